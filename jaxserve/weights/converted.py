"""A converted model as found on disk: everything but its numbers has been read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxserve.config import FloatFormat, ModelConfig
from jaxserve.model.parameters import model_parameters
from jaxserve.weights.checkpoint import Checkpoint, open_checkpoint
from jaxserve.weights.manifest import MANIFEST, PARAMETERS, Manifest, check_hashes, check_sizes

GGUF_METADATA = "gguf_metadata.json"
"""What a GGUF file said beside its tensors, tokenizer included, where the source was one."""


@dataclass(frozen=True)
class ConvertedCheckpoint:
    """A folder that `jaxserve convert` wrote; its files have the sizes they were written with."""

    path: Path
    config: ModelConfig
    metadata: Mapping[str, Any] | None
    """All metadata of the GGUF file that it was made from, as plain Python values; None for a folder."""
    fingerprint: str
    """Changes with the model, the recipe and every number."""
    recipe: str | None
    """Label of the recipe that its parameters were quantised with, name and version; None for none."""
    compute_format: FloatFormat
    """Of the parameters that are neither quantised nor kept in float32."""
    groups: tuple[tuple[str, ...], ...]
    """Names of the parameters in each Orbax checkpoint; see `group_folder`."""
    stored_formats: tuple[tuple[str, str], ...] = ()
    """The recipe's rules, where it came with the source: see `EngineConfig`."""
    num_widened: int = 0
    converted_from: str = ""
    calibration: str = ""
    """Label of what its parameters were calibrated by; see `CalibrationEntry`."""

    def group_folder(self, index: int) -> Path:
        """Where one of the Orbax checkpoints lies."""
        return group_folder(self.path, index)

    def verify(self) -> None:
        """Read every file whole. Raises ValueError, naming it, for one that is not what was written."""
        manifest = Manifest.read(self.path)
        check_hashes(self.path, manifest, manifest.files)


AnyCheckpoint = Checkpoint | ConvertedCheckpoint


def open_any_checkpoint(path: Path) -> AnyCheckpoint:
    """What lies there, whoever wrote it. Raises ValueError as `open_checkpoint` and `open_converted` do."""
    return open_converted(path) if (path / MANIFEST).is_file() else open_checkpoint(path)


def _holds_numbers(file: str) -> bool:
    """Whether a file, by its path in the folder, is part of an Orbax checkpoint; their indices are not."""
    return file.startswith(f"{PARAMETERS}/") and file.count("/") > 1


def group_folder(folder: Path, index: int) -> Path:
    """Where one of a converted model's Orbax checkpoints lies."""
    return folder / PARAMETERS / f"{index:03d}"


def open_converted(path: Path) -> ConvertedCheckpoint:
    """Read the manifest of a folder and hold its files against it, those of the parameters by size alone.

    Raises ValueError, naming the file, for one that is missing or damaged.
    """
    manifest = Manifest.read(path)
    check_sizes(path, manifest)
    check_hashes(path, manifest, (name for name in manifest.files if not _holds_numbers(name)))
    expected = [name for name, _ in model_parameters(manifest.model)]
    if [name for group in manifest.groups for name in group] != expected:
        raise ValueError(f"{path}: its parameters are not those of its model")
    metadata = None
    if GGUF_METADATA in manifest.files:
        metadata = json.loads((path / GGUF_METADATA).read_text(encoding="utf-8"))
    return ConvertedCheckpoint(
        path,
        manifest.model,
        metadata,
        manifest.fingerprint,
        manifest.recipe,
        manifest.compute_format,
        manifest.groups,
        manifest.stored_formats,
        manifest.num_widened,
        manifest.converted_from,
        manifest.calibration.label if manifest.calibration else "",
    )
