"""All 256 codes of fp8, as what matrix units widen, by ml_dtypes' account of both types."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.eighths import EIGHTH, FP8_UNIT, from_finite_fp8, from_fp8

CODES = np.arange(256, dtype=np.uint8)


@pytest.mark.parametrize("convert", [from_fp8, from_finite_fp8])
def test_every_finite_code_is_the_same_number(convert) -> None:
    expected = CODES.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    finite = np.isfinite(expected)
    numbers = FP8_UNIT * _converted(convert)
    np.testing.assert_array_equal(numbers[finite], expected[finite])
    assert finite.sum() == 254


def test_a_nan_stays_one_or_becomes_a_number_as_asked() -> None:
    is_nan = np.isnan(CODES.view(ml_dtypes.float8_e4m3fn).astype(np.float32))
    assert np.isnan(_converted(from_fp8)[is_nan]).all()
    assert np.isfinite(_converted(from_finite_fp8)).all()


def _converted(convert) -> np.ndarray:
    words = np.asarray(convert(CODES.view(np.uint32)))
    return words.view(np.uint8).view(np.dtype(EIGHTH)).astype(np.float32)
