"""Everything that can change an answer or how fast it comes, as one file with a hash."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import math
import os
import platform
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve.machine import Machine
from jaxserve.quantization import precision_of
from jaxserve.scheduling import SchedulerPolicy
from jaxserve.scheduling.classes import PriorityClass, RetryBudget, TenantPolicy
from jaxserve.text import Tokenizer, tokenizer_fingerprint
from jaxserve.version import __version__

if TYPE_CHECKING:
    from jaxserve.config import EngineConfig
    from jaxserve.engine.options import EngineOptions

Entries = Mapping[str, Any]
"""JSON values by name, tables within tables."""

FORMAT = 1
"""Of the file; another number cannot be read."""
ANSWER_PARTS = ("model", "tokenizer", "precision", "sampling")
"""What decides which answers are right. By the answer contract the others change them by rounding at most."""
KERNELS_PART = "kernels"
"""The one that is known only when an engine has been compiled."""
BATCH_PART = "batch"
"""What `jaxserve batch` adds of its own."""
_MARK = "jaxserve_manifest"
_PACKAGES = (
    "jax",
    "jaxlib",
    "libtpu",
    "jax-cuda13-plugin",
    "numpy",
    "tokenizers",
    "jinja2",
    "llguidance",
)
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_DEFAULT_MATMUL_PRECISION")
"""Of the environment, which XLA reads."""
_ABSENT = object()


@dataclass(frozen=True)
class RunManifest:
    """What an engine and its host loop are made of. Where models lie and what they are called is no part."""

    entries: Entries

    @property
    def digest(self) -> str:
        """The hash: 32 hexadecimal digits, the same for the same entries in any order."""
        text = json.dumps(self.entries, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    @property
    def policy(self) -> SchedulerPolicy:
        """The scheduler policy among the entries. Raises ValueError if there is none, or not a valid one."""
        try:
            return _read_policy(self.entries["scheduler"]["policy"])
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"the manifest has no scheduler policy of this version: {error}") from error

    def drift(self, now: RunManifest, parts: Collection[str] | None = None) -> list[str]:
        """What is different now, a phrase for each entry by its path; of these parts, by default of all."""
        before, after = dict(_leaves(self.entries)), dict(_leaves(now.entries))
        return [
            f"{name} is {_shown(after, name)} and was {_shown(before, name)}"
            for name in sorted({*before, *after})
            if before.get(name, _ABSENT) != after.get(name, _ABSENT)
            and (parts is None or name.split(".")[0] in parts)
        ]

    def extended(self, name: str, part: Entries) -> RunManifest:
        """With a further part."""
        return RunManifest({**self.entries, name: _plain(part)})

    def write(self, path: Path) -> None:
        """As indented JSON, complete or not at all. Raises ValueError as `check_place` does."""
        check_place(path)
        content = {_MARK: FORMAT, "hash": self.digest, **self.entries}
        partial = path.with_name(f"{path.name}.partial")
        partial.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        partial.replace(path)

    @classmethod
    def read(cls, path: Path) -> RunManifest:
        """Raises ValueError, naming the file, for one that is no manifest or was changed since it was
        written; OSError for one that cannot be read."""
        content = _json_of(path)
        if not is_manifest(content):
            raise ValueError(f"{path} is no manifest")
        if content[_MARK] != FORMAT:
            raise ValueError(f"{path} has format {content[_MARK]!r}, and this version reads {FORMAT}")
        found = cls({name: value for name, value in content.items() if name not in (_MARK, "hash")})
        if found.digest != content.get("hash"):
            raise ValueError(
                f"{path} was changed since it was written: its hash is {content.get('hash')!r}, and that of "
                f"what it says {found.digest!r}"
            )
        return found


def is_manifest(content: object) -> bool:
    """Whether a parsed JSON file says that it is one."""
    return isinstance(content, dict) and _MARK in content


def check_place(path: Path) -> None:
    """Raise ValueError where no manifest can be written: without a folder, and over a file that is none."""
    if not path.parent.is_dir():
        raise ValueError(f"{path}: there is no folder {path.parent}")
    if path.exists() and not _is_manifest_file(path):
        raise ValueError(f"{path} is no manifest, and is not written over: name another file")


def read_policy_or_manifest(path: Path) -> tuple[SchedulerPolicy, RunManifest | None]:
    """A scheduler policy from a file of its own, or from a manifest, which is returned too.

    Raises ValueError, naming the file, for one that is neither, OSError for one that cannot be read.
    """
    if path.suffix != ".json" or not is_manifest(_json_of(path)):
        return SchedulerPolicy.read(path), None
    manifest = RunManifest.read(path)
    try:
        return manifest.policy, manifest
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def manifest_of(
    fingerprint: str,
    tokenizer: Tokenizer,
    config: EngineConfig,
    options: EngineOptions,
    *,
    kernels: Mapping[str, str] | None = None,
    policy: SchedulerPolicy,
    prefix_caching: bool,
    sampling_defaults: Entries,
    draft_fingerprint: str | None = None,
) -> RunManifest:
    """The manifest of a model on an engine.

    Args:
        fingerprint: of the weights and the model's config.
        tokenizer: the model's.
        config: of the engine, from these options.
        options: what was chosen for it.
        kernels: of the engine; None, before it has been built, leaves their part out.
        policy: of the host loop.
        prefix_caching: likewise.
        sampling_defaults: what holds where a request leaves a parameter out.
        draft_fingerprint: of the model that drafts, if one does.
    """
    own = {"model", "cache", "recipe", "compute_format", "stored_formats", "draft"}
    compiled = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if field.name not in own
    }
    entries = {
        "model": {"family": config.model.family, "fingerprint": fingerprint},
        "tokenizer": {"fingerprint": tokenizer_fingerprint(tokenizer)},
        "precision": {"label": precision_of(config), "kv_format": config.cache.kv_format},
        "engine": compiled | {"page_size": config.cache.page_size, "num_pages": config.cache.num_pages},
        **({} if kernels is None else {KERNELS_PART: kernels}),
        "scheduler": {
            "policy": policy,
            "prefix_caching": prefix_caching,
            "host_kv_memory": options.host_kv_memory,
            "prefill_mesh": options.prefill_mesh,
            "speculative": options.speculative if config.draft is None else "draft",
        },
        **({} if config.draft is None else {"draft": _draft_entries(config.draft, draft_fingerprint)}),
        "sampling": {"defaults": sampling_defaults},
        "machine": _machine([size for _, size in config.mesh] or [1]),
        "versions": _versions(),
        "environment": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }
    return RunManifest(_plain(entries))


def _draft_entries(config: EngineConfig, fingerprint: str | None) -> Entries:
    """What drafts: no answer depends on it, but how fast they come."""
    return {"family": config.model.family, "fingerprint": fingerprint, "precision": precision_of(config)}


def _machine(mesh: Sequence[int]) -> Entries:
    import jax

    device = jax.devices()[0]
    here = Machine.here()
    host = {"processor": here.processor, "num_cores": here.cores} if device.platform == "cpu" else {}
    return {"platform": device.platform, "device": device.device_kind, "mesh": mesh, **host}


def _versions() -> Entries:
    """Of all that computes, as far as it is installed."""
    versions = {"jaxserve": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _plain(value: Any) -> Any:
    """The same as JSON values; infinities, which JSON does not have, by name."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return "inf" if value == math.inf else value


def _read_policy(entries: Entries) -> SchedulerPolicy:
    values = _finite(entries)
    tenants = {name: TenantPolicy(**entry) for name, entry in values["tenants"].items()}
    return SchedulerPolicy(
        **values
        | {
            "classes": tuple(PriorityClass(**entry) for entry in values["classes"]),
            "tenants": tenants,
            "other_tenants": TenantPolicy(**values["other_tenants"]),
            "retries": RetryBudget(**values["retries"]),
        }
    )


def _finite(value: Any) -> Any:
    """Undoes what `_plain` does to infinities."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return math.inf if value == "inf" else value


def _leaves(entries: Entries, path: str = "") -> Iterator[tuple[str, Any]]:
    """The values by their paths; an empty table is one."""
    for name, value in entries.items():
        where = f"{path}{name}"
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{where}.")
        else:
            yield where, value


def _shown(leaves: Entries, name: str) -> str:
    return json.dumps(leaves[name], ensure_ascii=False) if name in leaves else "absent"


def _json_of(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _is_manifest_file(path: Path) -> bool:
    try:
        return is_manifest(_json_of(path))
    except ValueError:
        return False
