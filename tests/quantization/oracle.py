"""What a quantised matrix stands for, by the definition, in numpy."""

from __future__ import annotations

import numpy as np

from jaxserve.quantization.weight import QuantisedWeight


def stored_numbers(weight: QuantisedWeight) -> np.ndarray:
    """Float64, the axes of the scales' channels kept and the inputs joined: `[*out, in]`."""
    values, scales = np.asarray(weight.values), np.asarray(weight.scales).astype(np.float64)
    if weight.format.bits == 8:
        return values.astype(np.float64).reshape(*scales.shape, -1) * scales[..., None]
    numbers = np.stack([values % 16, values // 16], axis=-1).reshape(*scales.shape, -1).astype(np.float64)
    zeros = 8.0 if weight.zeros is None else np.asarray(weight.zeros).astype(np.float64)[..., None]
    return ((numbers - zeros) * scales[..., None]).reshape(*scales.shape[:-1], -1)
