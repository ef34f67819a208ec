"""The cases that tests, benchmarks and compile checks share, and operands made from them.

What a layer that was not asked for holds is a NaN where its type has one, and otherwise as large as can be.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.quantised_matmul.nibbles import pack_nibbles

LAYER = 1


@dataclass(frozen=True)
class MatmulCase:
    num_rows: int
    num_inputs: int
    num_outputs: int
    storage: str = "int8"
    """Of the matrix: int8, float8_e4m3fn, or uint4x2."""
    group: int = 0
    """Inputs that share a scale; 0 for one a channel."""
    zeros: bool = False
    rows: str = "bfloat16"
    """Type of the rows; int16 for 12 bits."""
    scale_type: str = "float32"
    num_layers: int = 3

    @property
    def packed(self) -> bool:
        return self.storage == "uint4x2"

    @property
    def integer(self) -> bool:
        return self.rows in ("int8", "int16")

    @property
    def rows_scaled(self) -> bool:
        """Whether each row has a scale."""
        return self.integer or self.rows == "float8_e4m3fn"

    def shapes(self) -> tuple[jax.ShapeDtypeStruct | None, ...]:
        """Of the operands: rows, values, scales, zeros, row scales."""
        layers, outputs, inputs = self.num_layers, self.num_outputs, self.num_inputs
        by_group = (layers, inputs // self.group, outputs) if self.group else (layers, outputs)
        zero_type = jnp.uint8 if self.packed else jnp.int8
        shape = jax.ShapeDtypeStruct
        return (
            shape((self.num_rows, inputs), jnp.dtype(self.rows)),
            shape((layers, outputs, inputs // 2), jnp.uint8)
            if self.packed
            else shape((layers, outputs, inputs), jnp.dtype(self.storage)),
            shape(by_group, jnp.dtype(self.scale_type)),
            shape(by_group, zero_type) if self.zeros else None,
            shape((self.num_rows,), jnp.float32) if self.rows_scaled else None,
        )

    def operands(self, seed: int = 0) -> tuple[Any, ...]:
        """Numpy arrays of those shapes."""
        random = np.random.default_rng(seed)
        rows, values, scales, zeros, row_scales = self.shapes()
        assert rows is not None
        assert values is not None
        assert scales is not None
        numbers = (self.num_layers, self.num_outputs, self.num_inputs)
        if self.packed:
            values = pack_nibbles(random.integers(0, 16, numbers))
        elif self.storage == "int8":
            values = random.integers(-127, 128, numbers).astype(np.int8)
        else:
            values = random.normal(0, 100, numbers).clip(-448, 448).astype(values.dtype)
        if self.integer:
            largest = 127 if self.rows == "int8" else 2047
            x = random.integers(-largest, largest + 1, rows.shape).astype(rows.dtype)
        elif self.rows_scaled:
            x = random.normal(0, 100, rows.shape).clip(-448, 448).astype(rows.dtype)
        else:
            x = random.normal(0, 1, rows.shape).astype(rows.dtype)
        scales = random.uniform(0.5, 1.5, scales.shape).astype(scales.dtype)
        if zeros is not None:
            low, high = (0, 16) if self.packed else (-20, 20)
            zeros = random.integers(low, high, zeros.shape).astype(zeros.dtype)
        other = [layer for layer in range(self.num_layers) if layer != LAYER]
        values[other] = np.nan if self.storage == "float8_e4m3fn" else np.iinfo(values.dtype).max
        scales[other] = np.nan
        if row_scales is not None:
            row_scales = random.uniform(0.5, 1.5, row_scales.shape).astype(np.float32)
        return x, values, scales, zeros, row_scales


def _floating(*rows: int, inputs: int, outputs: int, **format: Any) -> list[MatmulCase]:
    return [
        MatmulCase(num_rows, inputs, outputs, rows=row_type, **format)
        for num_rows in rows
        for row_type in ("float32", "bfloat16")
    ]


CASES = (
    *(
        MatmulCase(num_rows, 640, 384, rows=row_type)
        for num_rows in (1, 20, 100)
        for row_type in ("int8", "int16")
    ),
    MatmulCase(5, 576, 96, rows="int16", num_layers=11),
    *_floating(3, 100, inputs=512, outputs=640),
    *_floating(3, 70, inputs=576, outputs=192, storage="float8_e4m3fn"),
    *_floating(1, 100, inputs=256, outputs=512, storage="float8_e4m3fn", group=128, scale_type="bfloat16"),
    *_floating(2, 90, inputs=384, outputs=256, group=64, zeros=True),
    *_floating(1, 30, 130, inputs=512, outputs=640, storage="uint4x2", group=128, scale_type="bfloat16"),
    *_floating(8, 80, inputs=512, outputs=320, storage="uint4x2", group=64, zeros=True),
    *_floating(
        9, 65, inputs=768, outputs=256, storage="uint4x2", group=32, zeros=True, scale_type="bfloat16"
    ),
    *_floating(4, inputs=768, outputs=96, storage="uint4x2", group=256),
    *_floating(50, inputs=512, outputs=640, storage="uint4x2", group=32, scale_type="bfloat16"),
    MatmulCase(50, 640, 384, rows="int16"),
    MatmulCase(3, 5120, 64, "float8_e4m3fn"),
    MatmulCase(3, 10240, 64, "uint4x2", group=128, zeros=True),
    MatmulCase(6, 384, 128, "float8_e4m3fn", rows="float8_e4m3fn"),
    MatmulCase(100, 512, 192, "float8_e4m3fn", rows="float8_e4m3fn"),
)
"""Of every format, by few rows and by many; tiles that are whole and others that are not."""
