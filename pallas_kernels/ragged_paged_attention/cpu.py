"""For CPU, in C++ (`cpu.cc`): straight from the pages, where the reference gathers copies of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.native import ATTENTION
from pallas_kernels.native import obstacle as native_obstacle
from pallas_kernels.page_layout import PageLayout
from pallas_kernels.ragged_paged_attention.params import AttentionParams
from pallas_kernels.ragged_paged_attention.reference import attend_reference

BLOCK_TOKENS = 16
FORMATS = {
    ("float32", "float32"): 0,
    ("bfloat16", "uint16"): 1,
    ("bfloat16", "bfloat16"): 1,
    ("int8", "int8"): 2,
}
"""(format, storage) of a pool, and its number in the source."""


def obstacle(layout: PageLayout, native: bool, **_: object) -> str | None:
    """Why the kernel cannot take a cache group, or None."""
    if reason := native_obstacle(native):
        return reason
    if layout.page_size % BLOCK_TOKENS:
        return f"pages of {layout.page_size} tokens are no multiple of {BLOCK_TOKENS}"
    if (layout.kv_format, layout.storage) not in FORMATS:
        return f"pages of {layout.kv_format} are stored as {layout.storage}"
    return None


def reads_pages_natively(layout: PageLayout) -> bool:
    """Whether the kernel, where there is one, takes a cache group: a row hangs on its context alone then."""
    return obstacle(layout, native=True) is None


def attend_cpu(
    q_THh: jax.Array,
    pool: jax.Array,
    scales: jax.Array | None,
    page_table_SP: jax.Array,
    query_start_S1: jax.Array,
    context_len_S: jax.Array,
    first_page: jax.Array | int,
    sinks_H: jax.Array | None,
    *,
    layout: PageLayout,
    params: AttentionParams,
    single: bool,
    **_: object,
) -> jax.Array:
    """See `ragged_paged_attention`. No model that runs on CPU has sinks: those are the reference's."""
    arguments = (q_THh, pool, scales, page_table_SP, query_start_S1, context_len_S, first_page)
    if sinks_H is not None:
        return attend_reference(*arguments, sinks_H, layout=layout, params=params, single=single)
    form = FORMATS[layout.kv_format, layout.storage]
    sizes = (
        layout.page_size,
        layout.num_kv_heads,
        layout.head_size,
        layout.planes,
        params.window,
        form,
        single,
    )
    out = jax.ffi.ffi_call(ATTENTION, jax.ShapeDtypeStruct(q_THh.shape, jnp.float32))(
        q_THh.astype(jnp.float32),
        pool,
        jnp.zeros((1,), jnp.float32) if scales is None else scales,
        page_table_SP,
        query_start_S1,
        context_len_S,
        jnp.asarray(first_page, jnp.int32),
        jnp.asarray(sizes, jnp.int32),
        jnp.asarray((params.scale, params.softcap), jnp.float32),
    )
    return out.astype(q_THh.dtype)
