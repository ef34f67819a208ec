"""How keys and values lie on a page: shared by every operation that touches the KV pool.

A pool is one flat array `[num_layers * num_pages, rows, 128]`; layer `l` of a group is reached by adding
`l * num_pages` to a page id. A page is head-major: for each KV head come its *planes*, each `[page_size,
128]`, so that a head's keys on a page are one contiguous tile.

- Head size up to 64: one plane, the key in lanes 0..63 and the value in lanes 64..127 of a token's row.
- Larger: the key's planes (`ceil(head_size / 128)`), then the value's.

Lanes past the head size are zero. A pool of eight bits has a sibling array of scales
`[num_layers * num_pages, scale_rows, scale_lanes]`, head-major too: a head's key scales of the page's tokens,
then its value scales, in rows of 128 lanes (fewer where a head needs fewer). An array whose last axis is not
exactly 128 gets another layout from XLA on TPU for each of its uses, and is copied whole between them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

LANES = 128
FORMAT_MAX = {"int8": 127.0, "float8_e4m3fn": 448.0}
"""The formats of eight bits, whose numbers are scaled, and the largest number of each."""
SMALLEST_PEAK = 1e-8
"""What a row's largest number is taken to be at least: one of zeros has a scale too."""


@dataclass(frozen=True)
class PageLayout:
    """The static half of a cache group."""

    page_size: int
    """Tokens on a page."""
    num_kv_heads: int
    head_size: int
    num_pages: int
    """Pages of each layer."""
    kv_format: str
    """float32, bfloat16, int8 or float8_e4m3fn: what a stored number means."""
    storage: str
    """The array's type; may be an unsigned integer of the same width where scatters of floats are slow."""

    @property
    def lanes_per_part(self) -> int:
        """Lanes that a key (or a value) takes."""
        return 64 if self.head_size <= 64 else -(-self.head_size // LANES) * LANES

    @property
    def planes(self) -> int:
        return 2 * self.lanes_per_part // LANES

    @property
    def rows(self) -> int:
        """Rows of 128 lanes on a page."""
        return self.num_kv_heads * self.planes * self.page_size

    @property
    def quantised(self) -> bool:
        return self.kv_format in FORMAT_MAX

    def pool_shape(self, num_layers: int) -> tuple[int, int, int]:
        return (num_layers * self.num_pages, self.rows, LANES)

    @property
    def scale_lanes(self) -> int:
        return min(2 * self.page_size, LANES)

    @property
    def scale_rows(self) -> int:
        return self.num_kv_heads * 2 * self.page_size // self.scale_lanes

    def scales_shape(self, num_layers: int) -> tuple[int, int, int]:
        return (num_layers * self.num_pages, self.scale_rows, self.scale_lanes)

    def num_bytes(self, num_layers: int) -> int:
        """Bytes of the group's pool and scales."""
        pool_bytes = math.prod(self.pool_shape(num_layers)) * jnp.dtype(self.storage).itemsize
        return pool_bytes + (4 * math.prod(self.scales_shape(num_layers)) if self.quantised else 0)

    def to_storage(self, values: jax.Array) -> jax.Array:
        """Numbers in the format, as what the pool's array holds."""
        values = values.astype(jnp.dtype(self.kv_format))
        return (
            values
            if self.storage == self.kv_format
            else jax.lax.bitcast_convert_type(values, jnp.dtype(self.storage))
        )

    def quantise(self, x_TKh: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Numbers that fit a format of eight bits, float32, and their scales: one a token and head."""
        x_TKh = x_TKh.astype(jnp.float32)
        largest = FORMAT_MAX[self.kv_format]
        scale_TK = jnp.maximum(jnp.max(jnp.abs(x_TKh), axis=-1), SMALLEST_PEAK) / largest
        scaled_TKh = x_TKh / scale_TK[..., None]
        if self.kv_format == "int8":
            return jnp.round(scaled_TKh), scale_TK
        # A quotient may be rounded beyond the largest number, which the cast would make a NaN.
        return jnp.clip(scaled_TKh, -largest, largest), scale_TK

    def from_storage(self, stored: jax.Array) -> jax.Array:
        return (
            stored
            if self.storage == self.kv_format
            else jax.lax.bitcast_convert_type(stored, jnp.dtype(self.kv_format))
        )

    def join(self, k_TKh: jax.Array, v_TKh: jax.Array) -> jax.Array:
        """Keys and values `[T, K, h]` as rows of planes `[T, K, planes, 128]`."""
        padding = ((0, 0), (0, 0), (0, self.lanes_per_part - self.head_size))
        joined = jnp.concatenate([jnp.pad(k_TKh, padding), jnp.pad(v_TKh, padding)], axis=-1)
        return joined.reshape(*k_TKh.shape[:2], self.planes, LANES)

    def split(self, planes: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Planes `[..., planes, t, 128]` as keys and values `[..., t, h]`."""
        if self.planes == 1:
            rows = planes[..., 0, :, :]
            return rows[..., : self.head_size], rows[..., 64 : 64 + self.head_size]
        wide = jnp.moveaxis(planes, -3, -2)
        wide = wide.reshape(*wide.shape[:-2], self.planes * LANES)
        half = self.lanes_per_part
        return wide[..., : self.head_size], wide[..., half : half + self.head_size]
