"""A checkpoint's parameters in the formats of an engine, and what that engine says of them."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import Mesh

from jaxserve.config import EngineConfig, FloatFormat, ModelConfig
from jaxserve.engine.parameters import Named, as_weights, quantised
from jaxserve.engine.placement import own_region, restored_place, to_shards
from jaxserve.model.parameters import model_parameters
from jaxserve.quantization import STORED, Recipe, recipe_in_force
from jaxserve.weights import AnyCheckpoint, Checkpoint, ConvertedCheckpoint, RegionOf, StoredWeights

logger = logging.getLogger(__name__)

Plain = Iterable[tuple[str, Any]]
"""Canonical names and arrays."""


def stored_as(config: EngineConfig, checkpoint: AnyCheckpoint, quantize: str | None) -> EngineConfig:
    """An engine's config with what follows from weights that are quantised already.

    They keep the formats that they are stored in where `keeps_stored` says so.

    Raises ValueError where the user asks to keep the formats of weights that are not quantised.
    """
    if not isinstance(checkpoint, Checkpoint):
        if not checkpoint.stored_formats:
            if checkpoint.recipe is None:
                refuse_stored(checkpoint, quantize)
            own = {"converted_from": checkpoint.converted_from, "calibration": checkpoint.calibration}
            return replace(config, **own)
        return replace(
            config,
            recipe=checkpoint.recipe,
            stored_formats=checkpoint.stored_formats,
            num_widened=checkpoint.num_widened,
        )
    stored = checkpoint.stored
    if stored is None:
        refuse_stored(checkpoint, quantize)
        return config
    if stored.recipe is None or not keeps_stored(stored, quantize):
        return replace(config, converted_from=stored.label)
    return replace(
        config,
        recipe=stored.recipe.label,
        stored_formats=stored.recipe.rules,
        num_widened=len(stored.widened),
    )


def keeps_stored(stored: StoredWeights, quantize: str | None) -> bool:
    """Whether weights stay in the formats that they are stored in, for the recipe that the user names.

    Without one they do, except for blocks of GGUF on a CPU: see `StoredWeights.is_gguf`.
    """
    if quantize is None:
        return not stored.is_gguf or jax.default_backend() != "cpu"
    return quantize == STORED


def refuse_stored(checkpoint: AnyCheckpoint, quantize: str | None) -> None:
    """Raises ValueError where the formats of weights that have none are to be kept."""
    if quantize == STORED:
        raise ValueError(f"quantize {STORED!r}, but the weights of {checkpoint.path} are not quantised")


def named_parameters(checkpoint: AnyCheckpoint, config: EngineConfig, mesh: Mesh | None = None) -> Named:
    """The checkpoint's parameters, one at a time, in the formats that the config says.

    What of them is not as the checkpoint stores it is logged. What a recipe rounds is brought to the mesh
    first, and rounded where it lies.
    """
    if not isinstance(checkpoint, Checkpoint):
        return _restored(checkpoint, config, mesh)
    recipe = recipe_in_force(config)
    if checkpoint.stored:
        log_conversion(checkpoint.stored, recipe, config.compute_format)
    spread = functools.partial(to_shards, model=config.model, mesh=mesh)
    if mesh is None:
        return read_parameters(checkpoint, recipe, config.compute_format, spread)
    infos = dict(model_parameters(config.model))
    region_of = functools.partial(own_region, model=config.model, infos=infos, mesh=mesh)
    return read_parameters(checkpoint, recipe, config.compute_format, spread, region_of)


def reported(named: Named, model: ModelConfig, on_progress: Callable[[int, int], None]) -> Named:
    """The same parameters; after each, `on_progress` hears how many have passed, and of how many."""
    total = sum(1 for _ in model_parameters(model))
    for number, entry in enumerate(named):
        yield entry
        on_progress(number + 1, total)


def read_parameters(
    checkpoint: Checkpoint,
    recipe: Recipe | None,
    compute_format: FloatFormat,
    spread: Callable[[Plain], Plain] = lambda named: named,
    region_of: RegionOf = lambda name, shape: None,
) -> Named:
    """The parameters of a checkpoint, in the formats of its own recipe, of another one, or of none.

    Args:
        checkpoint: what to read.
        recipe: gives parameters their formats; rounds them to these if it is not the checkpoint's own.
        compute_format: of the parameters that it leaves alone.
        spread: brings arrays to where they are to be rounded.
        region_of: the part that is needed here of each; None for all.
    """
    if recipe is None:
        return checkpoint.read(compute_format, region_of)
    if checkpoint.stored and recipe == checkpoint.stored.recipe:
        return as_weights(checkpoint.read_stored(compute_format, region_of))
    return quantised(spread(checkpoint.read("float32", region_of)), checkpoint.config, recipe, compute_format)


def log_conversion(stored: StoredWeights, recipe: Recipe | None, compute_format: FloatFormat) -> None:
    """Say what of quantised weights is loaded in another form than they are stored in."""
    if recipe and recipe != stored.recipe:
        logger.info("%s weights are quantised again, as %s", stored.label, recipe.label)
    elif recipe is None and stored.recipe:
        logger.info("%s weights are converted to %s", stored.label, compute_format)
    elif widened := stored.describe_widened(compute_format):
        # What was asked for is no surprise, nor is a GGUF file of which nothing can be kept.
        logger.log(logging.INFO if stored.is_gguf and recipe is None else logging.WARNING, "%s", widened)
    for note in stored.notes:
        logger.info("%s: %s", stored.label, note)


def _restored(checkpoint: ConvertedCheckpoint, config: EngineConfig, mesh: Mesh | None) -> Named:
    # Imported here: it needs the engine's own readers.
    from jaxserve.converted.parameters import restore_parameters

    recipe = recipe_in_force(config)
    place = None if mesh is None else functools.partial(restored_place, config.model, mesh)
    if recipe is None or checkpoint.recipe is not None:
        return restore_parameters(checkpoint, config.compute_format, place)
    plain = to_shards(restore_parameters(checkpoint, "float32", place), config.model, mesh)
    return quantised(plain, config.model, recipe, config.compute_format)
