"""GGUF's blocks taken apart into values, scales and minima, none of them rounded.

A block is a run of neighbouring inputs together with its scales. The layouts are those of the `block_q*`
structures in ggml's ggml-common.h. A block of 256 (Q2_K to Q6_K) has small integers for the scales of its
groups, and one scale for those: the product of the two has few bits, and float32 holds it exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from jaxserve.quantization import WeightFormat, weight_format
from jaxserve.weights.tensors import StoredTensor

Numbers = tuple[np.ndarray, np.ndarray, np.ndarray | None]
"""Values, scales and zeros of a matrix, each with an axis of rows before that of inputs or groups."""


@dataclass(frozen=True)
class BlockKind:
    """How blocks of one type are kept."""

    format: WeightFormat
    take_apart: Callable[[np.ndarray], Numbers]
    """Of uint8 `[blocks, bytes]`."""


def read_blocks(tensor: StoredTensor) -> Numbers:
    """The numbers of a tensor whose type is one of `BLOCKS`, its axes before the last joined to one."""
    encoding = tensor.encoding
    raw = tensor.read_raw().reshape(-1, encoding.block_bytes)
    values, scales, zeros = BLOCKS[encoding.name].take_apart(raw)
    rows = values.size // tensor.shape[-1]
    return (
        values.reshape(rows, -1),
        scales.reshape(rows, -1),
        None if zeros is None else zeros.reshape(rows, -1),
    )


def _bits(raw: np.ndarray, width: int, run: int) -> np.ndarray:
    """Integers of so many bits out of runs of bytes: the lowest bits of all bytes of a run come first."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    integers = (raw.reshape(len(raw), -1, 1, run) >> shifts) & np.uint8(2**width - 1)
    return integers.reshape(len(raw), -1)


def _half(raw: np.ndarray, first: int) -> np.ndarray:
    """`[blocks, 1]`: the number of half precision from a byte on."""
    return np.ascontiguousarray(raw[:, first : first + 2]).view("<f2")


def _products(half: np.ndarray, integers: np.ndarray) -> np.ndarray:
    return half.astype(np.float32) * integers.astype(np.float32)


def _signed(values: np.ndarray, zero: int) -> np.ndarray:
    return values.view(np.int8) - np.int8(zero)


def _q4_0(raw: np.ndarray) -> Numbers:
    return _bits(raw[:, 2:], 4, 16), _half(raw, 0), None


def _q4_1(raw: np.ndarray) -> Numbers:
    return _bits(raw[:, 4:], 4, 16), _half(raw, 0), _half(raw, 2)


def _q5_0(raw: np.ndarray) -> Numbers:
    values = _bits(raw[:, 6:], 4, 16) | _fifth_bits(raw[:, 2:6])
    return _signed(values, 16), _half(raw, 0), None


def _q5_1(raw: np.ndarray) -> Numbers:
    values = _bits(raw[:, 8:], 4, 16) | _fifth_bits(raw[:, 4:8])
    return values.view(np.int8), _half(raw, 0), _half(raw, 2)


def _fifth_bits(raw: np.ndarray) -> np.ndarray:
    """The highest bit of each of 32 values, in its place."""
    return np.unpackbits(raw, axis=1, bitorder="little") << np.uint8(4)


def _q8_0(raw: np.ndarray) -> Numbers:
    return np.ascontiguousarray(raw[:, 2:]).view(np.int8), _half(raw, 0), None


def _q2_k(raw: np.ndarray) -> Numbers:
    scales, minima = raw[:, :16] & 0x0F, raw[:, :16] >> 4
    return _bits(raw[:, 16:80], 2, 32), _products(_half(raw, 80), scales), -_products(_half(raw, 82), minima)


def _q3_k(raw: np.ndarray) -> Numbers:
    values = _bits(raw[:, 32:96], 2, 32) | (_bits(raw[:, :32], 1, 32) << np.uint8(2))
    scales = _bits(raw[:, 96:104], 4, 8) | (_bits(raw[:, 104:108], 2, 4) << np.uint8(4))
    # Counted from -4 up, they are stored from 0 up; a matrix of four bits has its zero at 8.
    return values + np.uint8(4), _products(_half(raw, 108), _signed(scales, 32)), None


def _q4_k(raw: np.ndarray) -> Numbers:
    return _bits(raw[:, 16:], 4, 32), *_scales_and_minima(raw)


def _q5_k(raw: np.ndarray) -> Numbers:
    values = _bits(raw[:, 48:], 4, 32) | (_bits(raw[:, 16:48], 1, 32) << np.uint8(4))
    return values.view(np.int8), *_scales_and_minima(raw)


def _scales_and_minima(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of eight groups, whose six bits lie in twelve bytes: of the last four groups' the highest two apart."""
    scales, minima, last = raw[:, 4:8], raw[:, 8:12], raw[:, 12:16]
    scales = np.hstack([scales & 0x3F, last & 0x0F | (scales >> 6) << np.uint8(4)])
    minima = np.hstack([minima & 0x3F, last >> 4 | (minima >> 6) << np.uint8(4)])
    return _products(_half(raw, 0), scales), -_products(_half(raw, 2), minima)


def _q6_k(raw: np.ndarray) -> Numbers:
    values = _bits(raw[:, :128], 4, 64) | (_bits(raw[:, 128:192], 2, 32) << np.uint8(4))
    scales = np.ascontiguousarray(raw[:, 192:208]).view(np.int8)
    return _signed(values, 32), _products(_half(raw, 208), scales), None


_FOUR, _EIGHT = "int4", "int8-weight-only"


def _of_32(base: str, take_apart: Callable[[np.ndarray], Numbers], minima: bool = False) -> BlockKind:
    return BlockKind(weight_format(base, group=32, minima=minima, scale_type="float16"), take_apart)


def _of_256(
    base: str, group: int, take_apart: Callable[[np.ndarray], Numbers], minima: bool = False
) -> BlockKind:
    return BlockKind(weight_format(base, group=group, minima=minima), take_apart)


BLOCKS: Mapping[str, BlockKind] = {
    "Q4_0": _of_32(_FOUR, _q4_0),
    "Q4_1": _of_32(_FOUR, _q4_1, minima=True),
    "Q5_0": _of_32(_EIGHT, _q5_0),
    "Q5_1": _of_32(_EIGHT, _q5_1, minima=True),
    "Q8_0": _of_32(_EIGHT, _q8_0),
    "Q2_K": _of_256(_FOUR, 16, _q2_k, minima=True),
    "Q3_K": _of_256(_FOUR, 16, _q3_k),
    "Q4_K": _of_256(_FOUR, 32, _q4_k, minima=True),
    "Q5_K": _of_256(_EIGHT, 32, _q5_k, minima=True),
    "Q6_K": _of_256(_EIGHT, 16, _q6_k),
}
"""A format for each type that holds its every number: values of other widths take four bits or eight."""
