"""What a quantised matrix stands for, by the definition, in numpy."""

from __future__ import annotations

import numpy as np

from jaxserve.quantization.weight import QuantisedWeight


def stored_numbers(weight: QuantisedWeight) -> np.ndarray:
    """Float64, the axes of the scales' channels kept and the inputs joined: `[*out, in]`."""
    values, scales = np.asarray(weight.values), np.asarray(weight.scales).astype(np.float64)
    if weight.format.bits == 4:
        values = np.stack([values % 16, values // 16], axis=-1)
    zeros = np.asarray(0.0 if weight.format.bits == 8 else 8.0)
    if weight.zeros is not None:
        zeros = np.asarray(weight.zeros).astype(np.float64)[..., None]
    if weight.format.minima:
        numbers = values.astype(np.float64).reshape(*scales.shape, -1) * scales[..., None] + zeros
        return numbers.reshape(*scales.shape[:-1], -1)
    numbers = (values.astype(np.float64).reshape(*scales.shape, -1) - zeros) * scales[..., None]
    return numbers.reshape(*scales.shape[:-1], -1) if weight.format.group else numbers
