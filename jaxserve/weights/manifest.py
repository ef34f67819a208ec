"""What a converted model says of itself: one JSON file beside its parameters."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, get_args

from jaxserve.config import FloatFormat, LayerKind, ModelConfig, RopeScaling

MANIFEST = "jaxserve.json"
"""Written last: a folder without it is no model."""
FORMAT = 2
"""Of the folder; another number cannot be read."""
PARAMETERS = "parameters"
"""Folder of the Orbax checkpoints, one for each of `Manifest.groups`."""

_READ_BYTES = 2**20


@dataclass(frozen=True)
class FileEntry:
    """A file of the folder as it was written."""

    num_bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> FileEntry:
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while data := file.read(_READ_BYTES):
                digest.update(data)
        return cls(path.stat().st_size, digest.hexdigest())


@dataclass(frozen=True)
class CalibrationEntry:
    """What the parameters were changed by, before they were quantised, that leaves the model the same."""

    label: str
    """Method, setting and version, as receipts and caches know it: smooth-0.5@1."""
    text_sha256: str
    num_tokens: int
    """Read of that text, those that open its windows included."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A converted model apart from its numbers."""

    model: ModelConfig
    recipe: str | None
    """Label of the recipe that its parameters were quantised with, name and version; None for none."""
    compute_format: FloatFormat
    """Of the parameters that are neither quantised nor kept in float32."""
    source: str
    """Fingerprint of the checkpoint that it was made from."""
    groups: tuple[tuple[str, ...], ...]
    """Names of the parameters in each Orbax checkpoint, in the order of `model_parameters`."""
    files: Mapping[str, FileEntry]
    """All other files by their path in the folder."""
    stored_formats: tuple[tuple[str, str], ...] = ()
    """The recipe's rules, where it came with the source: see `EngineConfig`."""
    num_widened: int = 0
    """Parameters that were quantised in the source, beside those, and are in the compute format."""
    converted_from: str = ""
    """How the source stored its weights, where they are all in another form."""
    calibration: CalibrationEntry | None = None

    @property
    def fingerprint(self) -> str:
        """Changes with the model, the recipe and every number."""
        text = [repr(self.model), str(self.recipe), self.compute_format]
        if self.stored_formats:
            text.append(repr(self.stored_formats))
        if self.calibration:
            text.append(repr(self.calibration))
        text += [f"{name} {entry.sha256}" for name, entry in sorted(self.files.items())]
        return hashlib.sha256("\n".join(text).encode()).hexdigest()[:32]

    def write(self, folder: Path) -> None:
        """Into a folder whose other files are complete."""
        content = {"format": FORMAT} | asdict(self)
        (folder / MANIFEST).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Raises ValueError, naming the file and what is wrong with it."""
        path = folder / MANIFEST
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            return cls._from_json(content)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else error
            raise ValueError(f"{path} is no description of a converted model: {reason}") from error

    @classmethod
    def _from_json(cls, content: dict[str, Any]) -> Manifest:
        calibration = content.get("calibration")
        if content["format"] != FORMAT:
            raise ValueError(f"it has format {content['format']!r}, and this version reads {FORMAT}")
        if content["compute_format"] not in get_args(FloatFormat):
            raise ValueError(f"compute_format {content['compute_format']!r} is not known")
        return cls(
            model=_model(content["model"]),
            recipe=content["recipe"],
            compute_format=content["compute_format"],
            source=content["source"],
            groups=tuple(tuple(names) for names in content["groups"]),
            files={name: FileEntry(**entry) for name, entry in content["files"].items()},
            # Folders of earlier versions do without.
            stored_formats=tuple((pattern, name) for pattern, name in content.get("stored_formats", ())),
            num_widened=content.get("num_widened", 0),
            converted_from=content.get("converted_from", ""),
            calibration=CalibrationEntry(**calibration) if calibration else None,
        )


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Raises ValueError, naming the file, if one is missing or has another size than it was written with."""
    for name, entry in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise ValueError(f"{path} is missing from a converted model")
        if path.stat().st_size != entry.num_bytes:
            raise ValueError(
                f"{path} has {path.stat().st_size} bytes; it was written with {entry.num_bytes}: "
                "damaged, or copied in part"
            )


def check_hashes(folder: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Raises ValueError, naming the file, if one of these is not what was written. Reads them whole."""
    for name in names:
        if FileEntry.of(folder / name) != manifest.files[name]:
            raise ValueError(f"{folder / name} is not what was written: its hash differs")


def _model(content: dict[str, Any]) -> ModelConfig:
    known = {field.name for field in fields(ModelConfig)}
    if surplus := sorted(content.keys() - known):
        raise ValueError(f"the model has settings that this version does not know: {', '.join(surplus)}")
    layers = tuple(_layer(entry) for entry in content["layers"])
    return ModelConfig(**content | {"layers": layers, "eos_token_ids": tuple(content["eos_token_ids"])})


def _layer(content: dict[str, Any]) -> LayerKind:
    scaling = content["rope_scaling"]
    values: dict[str, Any] = content | {"rope_scaling": RopeScaling(**scaling) if scaling else None}
    return LayerKind(**values)
