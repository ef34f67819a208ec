"""What the command line says of each route: `NAME=MODEL[,KEY=VALUE...]`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve.commands.options import parse_mesh_option, parse_size, parse_speculative, recipe_name

if TYPE_CHECKING:
    from jaxserve.run_manifest import RunManifest
    from jaxserve.scheduling import SchedulerPolicy

MAX_NAME_LEN = 128
"""Characters of a route's name."""


@dataclass(frozen=True, kw_only=True)
class RouteArguments:
    """One route as an operator declares it."""

    name: str
    """What requests call it."""
    model: str
    """A catalogue name, a folder, a `.gguf` file or a hub id."""
    fallback: str | None = None
    """The route that takes its overflow."""
    max_waiting: int | None = None
    """Requests of all classes that may wait for a slot, whatever the policy says."""
    policy_file: Path | None = None
    """A scheduler policy; None is the default one."""
    prefix_cache: bool = True
    """Whether prefixes are reused."""
    generation_config: str
    """"auto" takes the model's own defaults of sampling parameters, "none" the library's."""
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Fields of `EngineOptions`."""

    def __post_init__(self) -> None:
        if not self.name or len(self.name) > MAX_NAME_LEN or not self.name.isprintable() or "," in self.name:
            raise ValueError(
                f"route name {self.name!r}: expected 1 to {MAX_NAME_LEN} printable characters, no comma"
            )
        if self.max_waiting is not None and self.max_waiting < 0:
            raise ValueError(f"route {self.name!r}: max_waiting {self.max_waiting} is negative")

    def read_frozen(self) -> tuple[SchedulerPolicy, RunManifest | None]:
        """The policy in force, and the manifest that it comes from, if the file is one.

        Raises ValueError for a file that is neither, OSError for a missing one.
        """
        from jaxserve.run_manifest import read_policy_or_manifest
        from jaxserve.scheduling import DEFAULT_POLICY

        policy, frozen = DEFAULT_POLICY, None
        if self.policy_file is not None:
            policy, frozen = read_policy_or_manifest(self.policy_file)
        if self.max_waiting is not None:
            policy = replace(policy, max_waiting=self.max_waiting)
        return policy, frozen


def model_name(argument: str) -> str:
    """A model's own name: a path's last part, or what it is called by."""
    path = Path(argument).expanduser()
    if not path.exists():
        return argument
    return path.resolve().name.removesuffix(".gguf")


def read_routes(
    models: Sequence[str], routes: Sequence[str], name: str | None, common: RouteArguments
) -> list[RouteArguments]:
    """Every route, in order.

    Args:
        models: each is a route by the model's own name.
        routes: arguments of `--route`.
        name: instead of its own name, if there is one model and nothing else.
        common: what holds where a route says nothing.

    Raises ValueError, naming the argument, for what is malformed, unknown or there twice.
    """
    if name is not None and (len(models) != 1 or routes):
        raise ValueError("--name is for a single MODEL: with several, name each by --route NAME=MODEL")
    found = [_replaced(common, name=name or model_name(model), model=model) for model in models]
    found += [_read_route(text, common) for text in routes]
    if not found:
        raise ValueError("nothing to serve: name a MODEL, or give --route NAME=MODEL")
    names = [route.name for route in found]
    for one in names:
        if names.count(one) > 1:
            raise ValueError(f"two routes are called {one!r}: name them apart by --route NAME=MODEL")
    return found


def _read_route(text: str, common: RouteArguments) -> RouteArguments:
    head, *items = text.split(",")
    name, _, model = head.partition("=")
    if not (name.strip() and model.strip()):
        raise ValueError(f"--route {text!r}: expected NAME=MODEL[,KEY=VALUE...]")
    given: dict[str, Any] = {}
    for item in items:
        key, _, value = item.partition("=")
        key = key.strip().replace("-", "_")
        if key not in _KEYS:
            raise ValueError(f"--route {text!r}: {key!r} is not one of {', '.join(_KEYS)}")
        field_name, read = _KEYS[key]
        if field_name in given:
            raise ValueError(f"--route {text!r}: {key} is there twice")
        try:
            given[field_name] = read(value.strip())
        except (ValueError, argparse.ArgumentTypeError) as error:
            raise ValueError(f"--route {text!r}: {key}: {error}") from error
    return _replaced(common, name=name.strip(), model=model.strip(), **given)


def _replaced(common: RouteArguments, **given: Any) -> RouteArguments:
    """A copy in which whatever is not a field of its own is a setting of the engine."""
    own = {key: given.pop(key, getattr(common, key)) for key in _OWN}
    return RouteArguments(**own, settings={**common.settings, **given})


_OWN = ("name", "model", "fallback", "max_waiting", "policy_file", "prefix_cache", "generation_config")


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"{text!r} is no whole number from 0 up")
    return int(text)


def _flag(text: str) -> bool:
    if text not in ("", "true", "false"):
        raise ValueError(f"{text!r} is not true or false")
    return text != "false"


def _named(*choices: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in choices:
            raise ValueError(f"{text!r} is not one of {', '.join(choices)}")
        return text

    return read


def _recipe(text: str) -> str:
    return text if text == "none" else recipe_name(text)


def _optional(read: Callable[[str], str]) -> Callable[[str], str | None]:
    """`none` is None."""
    return lambda text: None if read(text) == "none" else text


def _name(text: str) -> str:
    if not text:
        raise ValueError("a name is missing")
    return text


_KEYS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "dtype": ("dtype", _name),
    "quantize": ("quantize", _optional(_recipe)),
    "kv": ("kv_format", _name),
    "kv_format": ("kv_format", _name),
    "kv_memory": ("kv_memory", parse_size),
    "host_kv_memory": ("host_kv_memory", parse_size),
    "slots": ("num_slots", _whole),
    "num_slots": ("num_slots", _whole),
    "max_model_len": ("max_model_len", _whole),
    "max_chunk": ("max_chunk", _whole),
    "deterministic": ("deterministic", _flag),
    "speculative": ("speculative", lambda text: None if text == "none" else parse_speculative(text)),
    # A comma ends an entry.
    "mesh": ("mesh", lambda text: parse_mesh_option(text.replace("+", ","))),
    "prefill_mesh": ("prefill_mesh", lambda text: parse_mesh_option(text.replace("+", ","))),
    "draft_quantize": ("draft_quantize", recipe_name),
    "max_waiting": ("max_waiting", _whole),
    "policy": ("policy_file", lambda text: Path(_name(text))),
    "prefix_cache": ("prefix_cache", _flag),
    "generation_config": ("generation_config", _named("auto", "none")),
    "fallback": ("fallback", _name),
}
"""For each key the field that it sets, and how its value is read; the engine checks ranges."""
