"""Small integers out of 32-bit words."""

from __future__ import annotations

import numpy as np

WORD_BITS = 32


def num_words(count: int, bits: int) -> int:
    """Words that so many integers take."""
    return -(-count * bits // WORD_BITS)


def unpack_words(words: np.ndarray, bits: int, axis: int, count: int) -> np.ndarray:
    """uint8: the integers in int32 words, those in the low bits first.

    Args:
        words: of any shape.
        bits: of each integer; 4 or 8.
        axis: along which they were packed.
        count: integers along it; those beyond are padding.
    """
    per_word = WORD_BITS // bits
    last = np.moveaxis(words, axis, -1)
    # Little-endian, as safetensors files are: byte i has the bits from 8 * i on.
    numbers = np.ascontiguousarray(last).astype("<i4", copy=False).view(np.uint8)
    if bits == 4:
        numbers = np.stack([numbers & 0x0F, numbers >> 4], axis=-1)
    numbers = numbers.reshape(*last.shape[:-1], last.shape[-1] * per_word)[..., :count]
    return np.moveaxis(numbers, -1, axis)


def pack_nibbles(values: np.ndarray) -> np.ndarray:
    """uint8 of half the last axis: two neighbours of 0 to 15 in a byte, the first in its low half."""
    return values[..., 0::2] | (values[..., 1::2] << np.uint8(4))
