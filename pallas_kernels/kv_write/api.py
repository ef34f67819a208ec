"""The operation's one entry: checks shapes at trace time, then writes by XLA's scatter.

There is no kernel, by measurement: on TPU the memory is written in tiles of 8 to 32 rows, so that a kernel of
its own would read and write back two tiles for each head and token, some 10,000 cycles of issuing copies for
64 tokens and 8 heads. XLA's scatter of their 1,024 rows takes an estimated 3,200 on v6e (in bfloat16, the
whole write 9,800), in place and without temporaries. Scales cost more than the numbers: 34,000 with int8.
On GPU XLA makes each scatter one kernel that writes into the donated pool: in the steps compiled for an H200
no instruction copies one.
"""

from __future__ import annotations

import jax

from pallas_kernels.kv_write.reference import kv_write_reference
from pallas_kernels.page_layout import PageLayout


def kv_write(
    pool: jax.Array,
    scales: jax.Array | None,
    k_TKh: jax.Array,
    v_TKh: jax.Array,
    page_T: jax.Array,
    offset_T: jax.Array,
    *,
    layout: PageLayout,
) -> tuple[jax.Array, jax.Array | None]:
    """Write one token's key and value for each row into the pool.

    Args:
        pool: `[num_layers * num_pages, rows, 128]`, donated by the caller's step.
        scales: float32 `layout.scales_shape(num_layers)` for a pool of eight bits, else None.
        k_TKh, v_TKh: new keys and values.
        page_T: int32 page of each row, the layer's offset included; two rows may share a (page, offset)
            only where nothing reads it (the sink page that padded rows write to).
        offset_T: int32 token offset on that page.
        layout: the pool's static layout.

    Returns the pool and the scales. Raises ValueError at trace time on shapes that disagree.
    """
    expected = (layout.num_kv_heads, layout.head_size)
    if k_TKh.shape[1:] != expected or v_TKh.shape != k_TKh.shape:
        raise ValueError(f"keys {k_TKh.shape} and values {v_TKh.shape} are not [T, {expected}]")
    if pool.shape[1] != layout.rows:
        raise ValueError(f"a page of {pool.shape[1]} rows; its layout has {layout.rows}")
    if (scales is None) == layout.quantised:
        raise ValueError(f"a pool of {layout.kv_format} with scales {scales is not None}")
    return kv_write_reference(pool, scales, k_TKh, v_TKh, page_T, offset_T, layout=layout)
