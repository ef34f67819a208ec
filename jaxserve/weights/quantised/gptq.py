"""GPTQ's layout, and AWQ's: integers in 32-bit words, the matrix transposed, floats of half precision.

`qweight [in, out]`, `qzeros [groups, out]` and `scales [groups, out]`. GPTQ (Frantar et al. 2022, as
AutoGPTQ writes it) packs values along the inputs, zeros along the outputs, and names each input's group;
AWQ (Lin et al. 2023, the gemm layout of its authors' kernels) packs both along the outputs, out of order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from jaxserve.weights.quantised.packing import WORD_BITS, num_words, unpack_words
from jaxserve.weights.quantised.scheme import FLOATS, Expected, Matrix, Scheme
from jaxserve.weights.settings import Settings

_AWQ_BITS = 4
# The output that each four bits of a word belong to is 0, 2, 4, 6, 1, 3, 5, 7; this is where each output is.
_AWQ_PLACES = np.array([0, 4, 1, 5, 2, 6, 3, 7])


def _check_words(count: int, bits: int, side: str) -> None:
    if count * bits % WORD_BITS:
        raise ValueError(f"has {count} {side}, expected a multiple of {WORD_BITS // bits} for {bits} bits")


@dataclass(frozen=True, kw_only=True)
class AwqScheme(Scheme):
    """Four bits with zeros, packed along the outputs."""

    @property
    def suffixes(self) -> tuple[str, ...]:
        return ("qweight", "scales", "qzeros")

    def tensors(self, shape: tuple[int, int]) -> Mapping[str, Expected]:
        outputs, inputs = shape
        _check_words(outputs, self.bits, "outputs")
        groups, words = self.num_groups(inputs), num_words(outputs, self.bits)
        return {
            "qweight": Expected.of((inputs, words), "I32"),
            "scales": Expected.of((groups, outputs), *FLOATS),
            "qzeros": Expected.of((groups, words), "I32"),
        }

    def read(self, found: Mapping[str, np.ndarray], shape: tuple[int, int]) -> Matrix:
        values, zeros = (self._unpacked(found[name]) for name in ("qweight", "qzeros"))
        return Matrix(values.T, found["scales"].T, zeros.T)

    def _unpacked(self, words: np.ndarray) -> np.ndarray:
        numbers = unpack_words(words, self.bits, 1, words.shape[1] * WORD_BITS // self.bits)
        return numbers.reshape(len(words), -1, len(_AWQ_PLACES))[..., _AWQ_PLACES].reshape(numbers.shape)


@dataclass(frozen=True, kw_only=True)
class GptqScheme(Scheme):
    """Four or eight bits; without `zeros` every zero is half the range."""

    zero_shift: int
    """What was taken off the zeros before they were packed: 1 in the first version of the format."""

    @property
    def suffixes(self) -> tuple[str, ...]:
        return ("qweight", "scales", "qzeros", "g_idx")

    def tensors(self, shape: tuple[int, int]) -> Mapping[str, Expected]:
        outputs, inputs = shape
        _check_words(inputs, self.bits, "inputs")
        _check_words(outputs, self.bits, "outputs")
        groups = self.num_groups(inputs)
        return {
            "qweight": Expected.of((num_words(inputs, self.bits), outputs), "I32"),
            "scales": Expected.of((groups, outputs), *FLOATS),
            "qzeros": Expected.of((groups, num_words(outputs, self.bits)), "I32"),
            "g_idx": Expected.of((inputs,), "I32"),
        }

    def read(self, found: Mapping[str, np.ndarray], shape: tuple[int, int]) -> Matrix:
        outputs, inputs = shape
        values = unpack_words(found["qweight"], self.bits, 0, inputs).T
        zeros = unpack_words(found["qzeros"], self.bits, 1, outputs).T
        # A zero of 0 has become the highest number.
        zeros = (zeros + np.uint8(self.zero_shift)) & np.uint8(2**self.bits - 1)
        half = 2 ** (self.bits - 1)
        if not self.zeros and np.any(zeros != half):
            other = zeros[zeros != half][0]
            raise ValueError(f"qzeros holds {other}, expected {half} throughout: sym is true")
        if self.bits == 8:  # around zero
            values, zeros = (values ^ np.uint8(half)).view(np.int8), (zeros ^ np.uint8(half)).view(np.int8)
        groups = self._group_of(found["g_idx"], self.num_groups(inputs))
        return Matrix(values, found["scales"].T, zeros if self.zeros else None, groups)

    def _group_of(self, g_idx: np.ndarray, num_groups: int) -> np.ndarray | None:
        if np.any((g_idx < 0) | (g_idx >= num_groups)):
            raise ValueError(f"g_idx holds {g_idx.min()} to {g_idx.max()}, expected 0 to {num_groups - 1}")
        if self.permuted:
            return g_idx
        run = len(g_idx) // num_groups
        if np.any(g_idx != np.arange(len(g_idx)) // run):
            raise ValueError(f"g_idx is not in order, expected runs of {run}: desc_act is false")
        return None


def awq_scheme(settings: Settings) -> Scheme:
    """What the `quantization_config` of an AWQ checkpoint says of its modules."""
    bits = settings.integer("bits" if settings.mentions("bits") else "w_bit")
    if bits != _AWQ_BITS:
        settings.refuse("bits" if settings.mentions("bits") else "w_bit", "4")
    for key in ("version", "format", "checkpoint_format"):
        if str(settings.get(key) or "gemm").lower() != "gemm":
            settings.refuse(key, "gemm")
    settings.insist({"zero_point": True, "sym": False, "desc_act": False})
    group = group_size(settings, "group_size" if settings.mentions("group_size") else "q_group_size")
    return AwqScheme(method="awq", bits=bits, group=group, zeros=True)


def gptq_scheme(settings: Settings) -> Scheme:
    """What the `quantization_config` of a GPTQ checkpoint says of its modules."""
    bits = settings.integer("bits")
    if bits not in (4, 8):
        settings.refuse("bits", "4 or 8")
    layout_key = "checkpoint_format" if settings.mentions("checkpoint_format") else "format"
    layout = settings.choice(layout_key, ("gptq", "gptq_v2"), "gptq")
    settings.insist({"is_marlin_format": False})
    group = group_size(settings, "group_size")
    return GptqScheme(
        method="gptq",
        bits=bits,
        group=group,
        zeros=not settings.flag("sym"),
        # One group can only be in order.
        permuted=settings.flag("desc_act", False) and group > 0,
        zero_shift=1 if layout == "gptq" else 0,
    )


def group_size(settings: Settings, key: str) -> int:
    """Inputs that share a scale; 0 for all, which is written as -1."""
    return 0 if settings.get(key) == -1 else settings.integer(key)
