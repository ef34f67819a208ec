"""Writes a model as the engine has it, once, to start from ever after."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from jaxserve.config import FloatFormat
from jaxserve.converted.parameters import GROUP_BYTES, save_parameters
from jaxserve.engine.loading import keeps_stored, log_conversion, read_parameters, refuse_stored, reported
from jaxserve.quantization import Recipe
from jaxserve.weights import AnyCheckpoint, Checkpoint
from jaxserve.weights.converted import GGUF_METADATA
from jaxserve.weights.manifest import FileEntry, Manifest

TEXT_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.json",
    "*.jinja",
    "additional_chat_templates/*.jinja",
)
"""What else of a folder in Hugging Face layout goes along, as it is."""


def convert(
    checkpoint: AnyCheckpoint,
    out: Path,
    *,
    recipe: Recipe | None = None,
    compute_format: FloatFormat | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    group_bytes: int = GROUP_BYTES,
) -> Manifest:
    """Write a model to a new folder, which any engine opens as it opens the source.

    Whatever interrupts it, `out` is there whole or not at all.

    Args:
        checkpoint: the source.
        out: the folder; must not exist.
        recipe: quantises the parameters; None, or "stored", keeps them as an engine here would.
        compute_format: of what is not quantised; by default bfloat16 if the source is, else float32.
        on_progress: called with the number of parameters written so far, and of all.
        group_bytes: of parameters held in memory at a time.

    Raises ValueError if `out` exists, if the source has been converted before, or for a recipe of another
    compute format.
    """
    if not isinstance(checkpoint, Checkpoint):
        raise ValueError(f"{checkpoint.path} has been converted already; name the model it was made from")
    if out.exists():
        raise ValueError(f"{out} exists; name a folder that does not")
    stored = _stored_format(checkpoint, recipe, compute_format)
    source = checkpoint.stored
    asked = recipe.name if recipe else None
    if source is None:
        refuse_stored(checkpoint, asked)
    own = source.recipe if source and keeps_stored(source, asked) else None
    recipe = own or (recipe if recipe and recipe.rules else None)
    out.parent.mkdir(parents=True, exist_ok=True)
    # Under a name that nobody looks for until all of it is there.
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        if source:
            log_conversion(source, recipe, stored)
        named = reported(read_parameters(checkpoint, recipe, stored), checkpoint.config, on_progress)
        groups = save_parameters(named, partial, group_bytes)
        _copy_text(checkpoint, partial)
        manifest = Manifest(
            model=checkpoint.config,
            recipe=recipe.label if recipe else None,
            compute_format=stored,
            source=checkpoint.fingerprint,
            groups=groups,
            files=_entries(partial),
            stored_formats=own.rules if own else (),
            num_widened=len(source.widened) if source and own else 0,
            converted_from=source.label if source and not own else "",
        )
        manifest.write(partial)
        partial.chmod(0o777 & ~_umask())
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return manifest


def _stored_format(checkpoint: Checkpoint, recipe: Recipe | None, asked: FloatFormat | None) -> FloatFormat:
    of_recipe = recipe.compute_format if recipe else None
    if recipe and of_recipe and asked not in (None, of_recipe):
        raise ValueError(f"recipe {recipe.name!r} is {of_recipe}, and {asked} was asked for")
    return asked or of_recipe or checkpoint.natural_format


def _copy_text(checkpoint: Checkpoint, folder: Path) -> None:
    """Tokenizer, chat template, sampling defaults."""
    if checkpoint.metadata is not None:
        (folder / GGUF_METADATA).write_text(json.dumps(checkpoint.metadata), encoding="utf-8")
        return
    for pattern in TEXT_FILES:
        for source in sorted(checkpoint.path.glob(pattern)):
            target = folder / source.relative_to(checkpoint.path)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(source, target)


def _entries(folder: Path) -> dict[str, FileEntry]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): FileEntry.of(path) for path in files}


def _umask() -> int:
    """Of the process, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
