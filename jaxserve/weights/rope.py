"""Rotary frequency scaling as checkpoints describe it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from jaxserve.config import LayerKind, RopeScaling
from jaxserve.weights.settings import Settings

_HF_COMMON_KEYS = ("rope_type", "type", "rope_theta", "partial_rotary_factor")


def hf_rope_scaling(rope: Settings, max_position: int) -> RopeScaling | None:
    """The scaling that a `rope_scaling` or `rope_parameters` object asks for, None for the default type.

    `max_position` stands in where the original length is not given. Raises ValueError for a type or a key
    that is not supported: every one of them changes the frequencies.
    """
    type_key = "rope_type" if rope.mentions("rope_type") else "type"
    kind = rope.choice(type_key, ("default", *_HF_KINDS), "default")
    for key in _HF_COMMON_KEYS:
        rope.get(key)
    rope.insist({"partial_rotary_factor": 1.0})
    scaling = _HF_KINDS[kind](rope, max_position) if kind in _HF_KINDS else None
    rope.refuse_unread(f"absent with rope type {kind}")
    return scaling


def _hf_linear(rope: Settings, max_position: int) -> RopeScaling:
    # Some configs carry the original length along; a linear factor does not depend on it.
    rope.get("original_max_position_embeddings")
    return RopeScaling(kind="linear", factor=rope.number("factor"))


def _hf_llama3(rope: Settings, max_position: int) -> RopeScaling:
    return RopeScaling(
        kind="llama3",
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_position=rope.integer("original_max_position_embeddings", max_position),
    )


def _hf_yarn(rope: Settings, max_position: int) -> RopeScaling:
    rope.insist({"truncate": True})
    original = rope.integer("original_max_position_embeddings", max_position)
    factor = rope.number("factor")
    mscale, mscale_all = rope.optional_number("mscale"), rope.optional_number("mscale_all_dim")
    attention = yarn_attention(factor)
    if mscale and mscale_all:
        attention = yarn_attention(factor, mscale) / yarn_attention(factor, mscale_all)
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_max_position=original,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention_factor=rope.number("attention_factor", attention),
    )


_HF_KINDS: Mapping[str, Callable[[Settings, int], RopeScaling]] = {
    "linear": _hf_linear,
    "llama3": _hf_llama3,
    "yarn": _hf_yarn,
}


def gguf_rope_scaling(settings: Settings, context_length: int) -> RopeScaling | None:
    """The scaling in a GGUF file's `{arch}.rope.scaling.*` keys, None where there is none."""
    kind = settings.choice("rope.scaling.type", ("none", "linear", "yarn"), "none")
    original = settings.integer("rope.scaling.original_context_length", context_length)
    factor = settings.number("rope.scaling.factor", 1.0)
    attention = settings.number("rope.scaling.attn_factor", 1.0)
    if kind == "none":
        settings.insist({"rope.scaling.factor": 1.0, "rope.scaling.attn_factor": 1.0})
        return None
    if kind == "linear":
        return RopeScaling(kind="linear", factor=factor)
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_max_position=original,
        beta_fast=settings.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=settings.number("rope.scaling.yarn_beta_slow", 1.0),
        # llama.cpp multiplies the stored factor by the paper's own.
        attention_factor=attention * yarn_attention(factor),
    )


def longest_sequence(stated: int, layers: Sequence[LayerKind]) -> int:
    """The stated length; with yarn, what it extends the original length to, where that is more."""
    extended = [
        int(scaling.factor * scaling.original_max_position)
        for kind in layers
        if (scaling := kind.rope_scaling) and scaling.kind == "yarn"
    ]
    return max([stated, *extended])


def yarn_attention(factor: float, mscale: float = 1.0) -> float:
    """YaRN's factor on cosines and sines, for a context `factor` times the original (arXiv 2309.00071)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def llama3_from_factors(factors: np.ndarray, head_size: int, theta: float) -> RopeScaling | None:
    """The llama3 scaling that gives these divisors of the `head_size / 2` frequencies; None if none does.

    GGUF keeps only the divisors. Releases differ in the factor (8 for Llama 3.1, 32 for 3.2), which is
    the greatest divisor; the other parameters are the same in all of them.
    """
    candidate = RopeScaling(kind="llama3", factor=float(factors.max(initial=1.0)))
    expected = _llama3_factors(candidate, head_size, theta)
    matches = factors.shape == expected.shape and np.allclose(factors, expected, rtol=1e-4)
    return candidate if matches else None


def _llama3_factors(scaling: RopeScaling, head_size: int, theta: float) -> np.ndarray:
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_size, 2) / head_size)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = np.clip((scaling.original_max_position / wavelengths - low) / (high - low), 0, 1)
    return 1 / ((1 - smooth) / scaling.factor + smooth)
