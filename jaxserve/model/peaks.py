"""The largest input of each channel of each matrix, over all rows that a model has read."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.config import ModelConfig
from jaxserve.model.parameters import ParameterInfo, layer_parameters

SegmentPeaks = tuple[dict[str, jax.Array], ...]
"""For each position in a segment's pattern the matrices by name: float32 `[count, *in]`, the largest absolute
number that has stood in each channel of the matrix's input."""
Peaks = tuple[SegmentPeaks, ...]
"""For each segment of the model; see `Params`."""
UNSEEN = ("expert_down",)
"""Matrices whose inputs only their kernel sees."""


def no_peaks(model: ModelConfig) -> Peaks:
    """Those of a model that has read nothing."""
    return tuple(
        tuple(
            {
                name: jnp.zeros((segment.count, *_inputs(info)), jnp.float32)
                for name, info in layer_parameters(model, kind).items()
                if not info.full_precision and name not in UNSEEN
            }
            for kind in segment.pattern
        )
        for segment in model.segments
    )


def raise_peaks(
    peaks: Mapping[str, jax.Array],
    repetition: jax.Array | int,
    inputs: Mapping[str, jax.Array],
    valid_T: jax.Array,
) -> dict[str, jax.Array]:
    """The peaks of a position in a pattern, after more rows of one of its layers.

    Args:
        peaks: `[count, *in]` by name.
        repetition: which of the layers it is.
        inputs: what each of its matrices was multiplied with, `[T, *in]` by name.
        valid_T: which of these rows count.
    """

    def raised(name: str, peak: jax.Array) -> jax.Array:
        x = jnp.abs(inputs[name].astype(jnp.float32))
        valid = valid_T.reshape(-1, *(1,) * (x.ndim - 1))
        return peak.at[repetition].max(jnp.max(jnp.where(valid, x, 0.0), axis=0))

    return {name: raised(name, peak) for name, peak in peaks.items()}


def peaks_by_name(model: ModelConfig, peaks: Peaks) -> dict[str, np.ndarray]:
    """`[*in]` of each matrix by its full name."""
    named: dict[str, np.ndarray] = {}
    for segment, positions in zip(model.segments, peaks, strict=True):
        for position, matrices in enumerate(positions):
            for name, stack in matrices.items():
                for repetition, peak in enumerate(np.asarray(stack)):
                    layer = segment.first + repetition * len(segment.pattern) + position
                    named[f"layers.{layer}.{name}"] = peak
    return named


def _inputs(info: ParameterInfo) -> tuple[int, ...]:
    return info.shape[len(info.shape) - info.num_input_axes :]
