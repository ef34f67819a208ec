"""Large activations moved into weights, before both are rounded: SmoothQuant (Xiao et al. 2023, 2211.10438).

A row of activations is rounded with one scale, which its few large channels set. Dividing channel j of what
a matrix reads by s_j, and multiplying the matrix's channel j by it, changes no product; with s_j between the
two (equation 4) neither is hard to round. Weights are measured within their rows there, which have a scale
each; the paper's have one for the matrix. The division costs nothing where it is folded into what writes the
channel:

- queries, keys and values, gate and up (of experts too, whose router reads the same), an untied head: the
  norm before them;
- the attention's output: the value rows, and their bias, of the KV head that it is a mean of. The queries of
  a group share those, so they share the scale, which is made of the largest among them;
- down: the up rows, since it reads `activation(gate) * up`.

A tied head has no norm of its own to fold into, and what an expert's down reads is not seen: they stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxserve.quantization.recipes import Recipe

Array = npt.NDArray[Any]
VERSION = 1
"""Raised whenever the same model and text would give other numbers than before."""
SMALLEST = 1e-5
"""Of a scale: a channel that the text has left at rest must not outgrow its row when it first stirs. As in
the authors' own code."""

_AFTER_NORM = {
    "attn_norm": ("qkv",),
    "mlp_norm": ("gate_up", "expert_gate_up", "router"),
    "final_norm": ("head",),
}
"""Norms, and the matrices that read them."""


def smoothing_label(alpha: float) -> str:
    """How receipts and caches know it, in the manner of a recipe's label."""
    return f"smooth-{alpha:g}@{VERSION}"


def check_smoothing(recipe: Recipe | None, alpha: float) -> Recipe:
    """The recipe. Raises ValueError for an alpha that is no share, or one that rounds no activations."""
    if not 0 <= alpha <= 1:
        raise ValueError(f"smooth-alpha {alpha} is out of range: it must be 0 to 1")
    if recipe is None or not recipe.rounds_activations:
        named = f"recipe {recipe.name!r}" if recipe else "a model that is not quantised"
        raise ValueError(
            f"calibration makes activations easier to round, and {named} rounds none; those that do are "
            "int8 and w8a8"
        )
    return recipe


def smooth_scales(peak: Array, weight_peak: Array, alpha: float) -> Array:
    """Float32 s of each channel: `peak ** alpha / weight_peak ** (1 - alpha)`, 1 for one that is all zero.

    Args:
        peak: largest absolute activation of each channel.
        weight_peak: largest absolute weight of each, of rows brought to one size, in the same shape.
        alpha: how much of the difficulty moves into the weights, 0 to 1.
    """
    alive = (peak > 0) & (weight_peak > 0)
    x = np.where(alive, peak, 1.0).astype(np.float64)
    w = np.where(alive, weight_peak, 1.0).astype(np.float64)
    return np.maximum(x**alpha / w ** (1 - alpha), SMALLEST).astype(np.float32)


def smoothed(
    named: Iterable[tuple[str, Array]], peaks: Mapping[str, Array], alpha: float
) -> Iterator[tuple[str, Array]]:
    """A model's parameters with the scales folded in, of a layer at a time, in the order in which they come.

    Args:
        named: canonical names and float32 arrays, in the order of `model_parameters`.
        peaks: for each matrix that is to be smoothed the largest absolute input of each channel, `[*in]`.
        alpha: see `smooth_scales`.
    """
    part: dict[str, Array] = {}
    for name, array in named:
        if part and _part_of(name) != _part_of(next(iter(part))):
            yield from _fold(part, peaks, alpha).items()
            part = {}
        part[name] = array
    yield from _fold(part, peaks, alpha).items()


def _part_of(name: str) -> str:
    """What is folded together: the parameters of a layer, and those around the layers."""
    return name.rpartition(".")[0]


def _fold(part: Mapping[str, Array], peaks: Mapping[str, Array], alpha: float) -> dict[str, Array]:
    prefix = _part_of(next(iter(part)))
    prefix += "." if prefix else ""
    own = {name.removeprefix(prefix): array for name, array in part.items()}
    found = {name: peaks[prefix + name] for name in own if prefix + name in peaks}
    if "o" in found:
        scale_Kh = _scales_of("o", own["o"], found["o"], alpha)
        own["qkv"] = _divided(own["qkv"], -1, 1, scale_Kh[..., None])
        if "qkv_bias" in own:
            own["qkv_bias"] = _divided(own["qkv_bias"], -1, 1, scale_Kh)
        own["o"] = own["o"] * scale_Kh[None, :, None]
    if "down" in found:
        scale_F = _scales_of("down", own["down"], found["down"], alpha)
        own["gate_up"] = _divided(own["gate_up"], 1, 0, scale_F[:, None])
        own["down"] = own["down"] * scale_F
    for norm, readers in _AFTER_NORM.items():
        for name in found.keys() & set(readers):
            scale_D = _scales_of(name, own[name], found[name], alpha)
            own[norm] = own[norm] / scale_D
            for reader in own.keys() & set(readers):
                own[reader] = own[reader] * scale_D
    return {prefix + name: array for name, array in own.items()}


def _scales_of(name: str, weight: Array, peak: Array, alpha: float) -> Array:
    """`[*in]`, but `[K, h]` for the output projection `[D, K, G, h]`.

    Rows of weights have scales of their own, so what counts of a channel is its share of each row's largest.
    """
    size = np.abs(weight)
    inputs = tuple(range(weight.ndim - peak.ndim, weight.ndim))
    size /= np.maximum(size.max(axis=inputs, keepdims=True), np.finfo(np.float32).tiny)
    weight_peak = size.max(axis=tuple(range(weight.ndim - peak.ndim)))
    if name == "o":
        peak, weight_peak = peak.max(axis=1), weight_peak.max(axis=1)
    return smooth_scales(peak, weight_peak, alpha)


def _divided(array: Array, index: int, axis: int, scale: Array) -> Array:
    """A copy of the array, one member along an axis divided."""
    result = array.copy()
    place = (slice(None),) * axis + (index,)
    result[place] /= scale
    return result
