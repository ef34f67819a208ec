"""The operation's one entry: checks shapes at trace time, then picks an implementation."""

from __future__ import annotations

import jax

from pallas_kernels.dispatch import Implementation, Target, choose
from pallas_kernels.page_layout import PageLayout
from pallas_kernels.ragged_paged_attention.cpu import attend_cpu
from pallas_kernels.ragged_paged_attention.cpu import obstacle as cpu_obstacle
from pallas_kernels.ragged_paged_attention.gpu import attend_gpu
from pallas_kernels.ragged_paged_attention.gpu import obstacle as gpu_obstacle
from pallas_kernels.ragged_paged_attention.params import AttentionParams
from pallas_kernels.ragged_paged_attention.reference import attend_reference
from pallas_kernels.ragged_paged_attention.row import attend_row
from pallas_kernels.ragged_paged_attention.row import obstacle as row_obstacle
from pallas_kernels.ragged_paged_attention.tpu import attend_tpu, obstacle

IMPLEMENTATIONS = (
    Implementation(
        "tpu", "tpu", attend_tpu, obstacle, evidence="benchmarks/results/tpu-schedule-attention.json"
    ),
    Implementation("gpu", "gpu", attend_gpu, gpu_obstacle),
    Implementation("cpu", "cpu", attend_cpu, cpu_obstacle),
    Implementation("row", "cpu", attend_row, row_obstacle),
    Implementation("reference", None, attend_reference),
)


def ragged_paged_attention(
    q_THh: jax.Array,
    pool: jax.Array,
    scales: jax.Array | None,
    page_table_SP: jax.Array,
    query_start_S1: jax.Array,
    context_len_S: jax.Array,
    first_page: jax.Array | int,
    *,
    layout: PageLayout,
    params: AttentionParams,
    single: bool,
    sinks_H: jax.Array | None = None,
    target: Target | None = None,
) -> jax.Array:
    """Causal attention of each row over its own sequence's pages, this step's tokens included.

    Args:
        q_THh: queries, rotary already applied; the rows of a sequence are contiguous.
        pool: `[num_layers * num_pages, rows, 128]` in `layout`.
        scales: float32 `layout.scales_shape(num_layers)` for a pool of 8 bits, else None.
        page_table_SP: int32 page ids of each sequence within a layer; P * page_size is a multiple of
            `params.context_block`.
        query_start_S1: int32 `[S + 1]`, the first row of each sequence; rows past the last are padding.
        context_len_S: int32 tokens of each sequence after this step; its rows are the last of them.
        first_page: the layer's offset in the pool.
        single: every sequence has exactly one row (T == S), or is padding with a context of 0.
        sinks_H: logits that take part in each head's softmax without a value (attention sinks), or None.
        target: the device to trace for; None for any, which takes the reference.

    Returns `[T, H, h]` in q's type; padded rows hold finite numbers without meaning.
    Raises ValueError at trace time on shapes that disagree.
    """
    _check(q_THh, page_table_SP, query_start_S1, context_len_S, sinks_H, layout, params, single)
    target = target or Target()
    chosen, interpret = choose(
        "ragged_paged_attention",
        IMPLEMENTATIONS,
        target,
        layout=layout,
        params=params,
        table_shape=page_table_SP.shape,
        native=target.native,
        num_rows=q_THh.shape[0],
        single=single,
        compute=str(q_THh.dtype),
        queries_per_kv=q_THh.shape[1] // layout.num_kv_heads,
        capability=target.capability if target.platform == "gpu" else None,
    )
    return chosen.run(
        q_THh,
        pool,
        scales,
        page_table_SP,
        query_start_S1,
        context_len_S,
        first_page,
        sinks_H,
        layout=layout,
        params=params,
        single=single,
        target=target,
        interpret=interpret,
    )


def _check(
    q_THh: jax.Array,
    page_table_SP: jax.Array,
    query_start_S1: jax.Array,
    context_len_S: jax.Array,
    sinks_H: jax.Array | None,
    layout: PageLayout,
    params: AttentionParams,
    single: bool,
) -> None:
    num_rows, num_heads, head_size = q_THh.shape
    num_sequences, num_pages = page_table_SP.shape
    if head_size != layout.head_size or num_heads % layout.num_kv_heads:
        raise ValueError(f"queries {q_THh.shape} over {layout.num_kv_heads} heads of {layout.head_size}")
    if single and num_rows != num_sequences:
        raise ValueError(f"{num_rows} rows for {num_sequences} sequences of one row")
    if query_start_S1.shape != (num_sequences + 1,) or context_len_S.shape != (num_sequences,):
        raise ValueError(f"query_start {query_start_S1.shape}, context_len {context_len_S.shape}")
    if sinks_H is not None and sinks_H.shape != (num_heads,):
        raise ValueError(f"sinks {sinks_H.shape} for {num_heads} heads")
    if params.context_block % layout.page_size or num_pages * layout.page_size % params.context_block:
        raise ValueError(
            f"context_block {params.context_block} over {num_pages} pages of {layout.page_size} tokens"
        )
