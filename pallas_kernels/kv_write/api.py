"""The operation's one entry: checks shapes at trace time, then picks an implementation.

On TPU the least that can be written is a memory tile of 8 to 32 rows. XLA's scatter takes the rows of heads
and tokens 16 at a time: it fetches their tiles, waits, puts them back, waits, and does the same again for all
scales. The kernel has the tiles of many tokens on their way at the same time, all heads of a token in one
copy, and quantises on the way (`python -m benchmarks.tpu_schedule --only write`).

On GPU XLA makes each scatter one kernel that writes into the donated pool: in the steps compiled for an H200
no instruction copies one.
"""

from __future__ import annotations

import jax

from pallas_kernels.dispatch import Implementation, Target, choose
from pallas_kernels.kv_write.reference import kv_write_reference
from pallas_kernels.kv_write.tpu import obstacle, write_tpu
from pallas_kernels.page_layout import PageLayout

IMPLEMENTATIONS = (
    Implementation(
        "tpu", "tpu", write_tpu, obstacle, evidence="benchmarks/results/tpu-schedule-attention.json"
    ),
    Implementation("reference", None, kv_write_reference),
)


def kv_write(
    pool: jax.Array,
    scales: jax.Array | None,
    k_TKh: jax.Array,
    v_TKh: jax.Array,
    page_T: jax.Array,
    offset_T: jax.Array,
    *,
    layout: PageLayout,
    target: Target | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Write one token's key and value for each row into the pool.

    Args:
        pool: `[num_layers * num_pages, rows, 128]`, donated by the caller's step.
        scales: float32 `layout.scales_shape(num_layers)` for a pool of eight bits, else None.
        k_TKh, v_TKh: new keys and values.
        page_T: int32 page of each row, the layer's offset included; two rows may share a (page, offset)
            only where nothing reads it (the sink page that padded rows write to). Rows on one page follow
            each other, and so do their offsets.
        offset_T: int32 token offset on that page.
        layout: the pool's static layout.
        target: the device to trace for; None for any, which takes the reference.

    Returns the pool and the scales. Raises ValueError at trace time on shapes that disagree.
    """
    expected = (layout.num_kv_heads, layout.head_size)
    if k_TKh.shape[1:] != expected or v_TKh.shape != k_TKh.shape:
        raise ValueError(f"keys {k_TKh.shape} and values {v_TKh.shape} are not [T, {expected}]")
    if pool.shape[1] != layout.rows:
        raise ValueError(f"a page of {pool.shape[1]} rows; its layout has {layout.rows}")
    if (scales is None) == layout.quantised:
        raise ValueError(f"a pool of {layout.kv_format} with scales {scales is not None}")
    chosen, interpret = choose(
        "kv_write", IMPLEMENTATIONS, target or Target(), layout=layout, num_rows=page_T.shape[0]
    )
    return chosen.run(pool, scales, k_TKh, v_TKh, page_T, offset_T, layout=layout, interpret=interpret)
