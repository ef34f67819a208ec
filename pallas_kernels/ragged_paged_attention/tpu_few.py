"""The decode-shaped TPU kernel: a few rows a sequence, all of them with all queries of a kv head one tile.

One loop runs over the blocks of all sequences, so that a sequence's first block is on its way while its
predecessor's last ones are reduced. Keys and values are the matrix unit's stationary operand; a head's rows
pass over them once.

Axes: S sequences, K kv heads, M rows of a tile (rows of a sequence times queries of a kv head, padded to
whole sublanes), t positions of a block, W lanes of a query or of a result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.page_layout import LANES, PageLayout
from pallas_kernels.ragged_paged_attention.params import AttentionParams
from pallas_kernels.ragged_paged_attention.tpu_pages import PageRing, Ref, Scalar, ring_types, split_refs
from pallas_kernels.ragged_paged_attention.tpu_softmax import MASKED, Softmax

HALF_OF_REGISTERS = 128 << 10
"""Bytes that 32 of 64 registers hold."""


@dataclass(frozen=True)
class FewSizes:
    """What is tuned."""

    pages_per_block: int
    num_buffers: int
    sequences_per_step: int


def attend_few(
    q_SKMW: jax.Array,
    sinks_KM: jax.Array | None,
    pool: jax.Array,
    scales: jax.Array | None,
    page_table_SP: jax.Array,
    first_position_S: jax.Array,
    end_S: jax.Array,
    first_page: jax.Array,
    *,
    layout: PageLayout,
    params: AttentionParams,
    queries_per_kv: int,
    one_row: bool,
    sizes: FewSizes,
    partial: bool = False,
    eighths: bool = False,
    interpret: Any = False,
) -> list[jax.Array]:
    """`[S, K, M, V * 128]`: each row's attention, in the lanes of the planes that hold the values.

    Args:
        q_SKMW: queries, W being 128 times the planes of a key; row m is that of query m % queries_per_kv of
            row m // queries_per_kv. Lanes past the head size are zero.
        sinks_KM: float32 logits of the attention sinks, or None.
        first_position_S: int32 position of each sequence's first row.
        end_S: int32, the position after the last that any of its rows sees; 0 for a sequence to be skipped.
        first_page: int32 scalar.
        one_row: no sequence has more than one row.
        sizes: sequences_per_step divides S.
        partial: whether what is returned is to be joined: results are float32, and there are also the
            logarithms, in base two, of each row's sum of exponentials, `[S, K, M, 128]`, all lanes the same.
        eighths: whether fp8 is multiplied as EIGHTHs.

    Sequences without rows get zeros. See `ragged_paged_attention` for the rest.
    """
    num_sequences, num_heads, num_rows, width = q_SKMW.shape
    per_step = sizes.sequences_per_step
    block_tokens = sizes.pages_per_block * layout.page_size
    num_steps = num_sequences // per_step
    low_S = jnp.maximum(first_position_S - params.window + 1, 0) if params.window else None
    first_block_S = jnp.zeros_like(end_S) if low_S is None else jnp.where(end_S > 0, low_S // block_tokens, 0)
    num_blocks_S = -(-end_S // block_tokens) - first_block_S
    num_items = jnp.sum(num_blocks_S.reshape(num_steps, per_step), axis=1, dtype=jnp.int32)
    number_S = jnp.arange(num_sequences, dtype=jnp.int32)
    next_S = lax.cummin(jnp.where(end_S > 0, number_S, num_sequences), reverse=True)
    # In one dimension, an entry's address is its number.
    table_width = -(-page_table_SP.shape[1] // sizes.pages_per_block) * sizes.pages_per_block
    table = page_table_SP + first_page
    table = jnp.pad(table, ((0, 0), (0, table_width - table.shape[1]))).reshape(-1)
    value_lanes = LANES * max(layout.planes // 2, 1)
    out_lanes = [value_lanes, LANES] if partial else [value_lanes]
    kernel = functools.partial(
        _kernel,
        layout=layout,
        params=params,
        queries_per_kv=queries_per_kv,
        one_row=one_row,
        has_sinks=sinks_KM is not None,
        partial=partial,
        eighths=eighths,
    )

    def per_sequence(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((per_step, *shape), lambda step, *_: (step, *(0,) * len(shape)))

    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    in_specs = [
        pl.BlockSpec((per_step * table_width,), lambda step, *_: (step,), memory_space=pltpu.SMEM),
        per_sequence(num_heads, num_rows, width),
        *([pl.BlockSpec((num_heads, num_rows, LANES), lambda *_: (0, 0, 0))] if sinks_KM is not None else []),
        in_hbm,
        *([in_hbm] if scales is not None else []),
    ]
    operands = [table, q_SKMW]
    if sinks_KM is not None:
        operands.append(jnp.broadcast_to(sinks_KM[..., None], (num_heads, num_rows, LANES)))
    operands += [pool, *([scales] if scales is not None else [])]
    state_type = pltpu.VMEM((num_heads, num_rows, LANES), jnp.float32)
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(num_steps,),
            in_specs=in_specs,
            out_specs=[per_sequence(num_heads, num_rows, lanes) for lanes in out_lanes],
            scratch_shapes=[
                *ring_types(layout, sizes.pages_per_block, sizes.num_buffers),
                pltpu.VMEM((num_heads, num_rows, value_lanes), jnp.float32),
                state_type,
                state_type,
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(
                (num_sequences, num_heads, num_rows, lanes), jnp.float32 if partial else q_SKMW.dtype
            )
            for lanes in out_lanes
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",), disable_bounds_checks=True),
        interpret=interpret,
        name="paged_attention_few",
    )(
        jnp.pad(end_S, (0, 1)),
        jnp.pad(first_position_S, (0, 1)),
        jnp.pad(next_S, (0, 2), constant_values=num_sequences),
        num_items,
        *operands,
    )


@dataclass(frozen=True)
class _Sequences:
    """What the kernel's scalars say of sequences, and the order of blocks."""

    end_ref: Ref
    first_position_ref: Ref
    next_ref: Ref
    """The first sequence with any rows, from each one on."""
    window: int
    block_tokens: int

    def first_position(self, sequence: Scalar) -> Scalar:
        return self.first_position_ref[sequence]

    def low(self, sequence: Scalar) -> Scalar:
        """The first position that any of the rows sees."""
        if not self.window:
            return 0
        return jnp.maximum(self.first_position(sequence) - self.window + 1, 0)

    def begin(self, sequence: Scalar) -> tuple[Scalar, Scalar]:
        """From a sequence on, the first block that there is: its sequence and its number there."""
        sequence = self.next_ref[sequence]
        return sequence, lax.div(self.low(sequence), self.block_tokens) if self.window else jnp.int32(0)

    def advance(self, item: tuple[Scalar, Scalar]) -> tuple[Scalar, Scalar]:
        """The block after this one."""
        sequence, block = item
        after = self.begin(sequence + 1)
        last = self.is_last(item)
        return jnp.where(last, after[0], sequence), jnp.where(last, after[1], block + 1)

    def is_first(self, item: tuple[Scalar, Scalar]) -> Scalar:
        return item[1] * self.block_tokens <= self.low(item[0])

    def is_last(self, item: tuple[Scalar, Scalar]) -> Scalar:
        return (item[1] + 1) * self.block_tokens >= self.end_ref[item[0]]


def _kernel(
    end_ref: Ref,  # SMEM [S + 1]
    first_position_ref: Ref,  # SMEM [S + 1]
    next_ref: Ref,  # SMEM [S + 2]
    num_items_ref: Ref,  # SMEM [steps]
    table_ref: Ref,  # SMEM [per_step * P]
    q_ref: Ref,  # VMEM [per_step, K, M, W]
    *refs: Ref,
    layout: PageLayout,
    params: AttentionParams,
    queries_per_kv: int,
    one_row: bool,
    has_sinks: bool,
    partial: bool,
    eighths: bool,
) -> None:
    sinks_ref, refs = (refs[0], refs[1:]) if has_sinks else (None, refs)
    logarithm_ref, refs = _without_logarithm(layout, refs) if partial else (None, refs)
    pool_refs, out_ref, ring_refs, state = split_refs(layout, refs)
    ring = PageRing(layout, *pool_refs, *ring_refs, eighths=eighths)
    softmax = Softmax(state[0], state[1], state[2], sinks_ref, layout, params, ring.unit)
    sequences = _Sequences(end_ref, first_position_ref, next_ref, params.window, ring.block_tokens)
    per_step = q_ref.shape[0]
    first_sequence = pl.program_id(0) * per_step
    pages_per_sequence = table_ref.shape[0] // per_step
    num_items = num_items_ref[pl.program_id(0)]
    num_ahead = ring.num_buffers - 1

    def start(number: Scalar, item: tuple[Scalar, Scalar]) -> tuple[Scalar, Scalar]:
        """Begin to fetch an item if there is one of that number; returns the next."""
        sequence, block = item
        # Past the last item any of the step's sequences does: none of its pages is wanted.
        high = jnp.where(number < num_items, end_ref[sequence], 0)
        local = jnp.clip(sequence - first_sequence, 0, per_step - 1)
        first_entry = local * pages_per_sequence + block * ring.pages_per_block
        ring.start(
            lax.rem(number, ring.num_buffers),
            block,
            sequences.low(sequence),
            high,
            lambda page: table_ref[first_entry + page],
        )
        return sequences.advance(item)

    def step(
        number: jax.Array, cursors: tuple[tuple[Scalar, Scalar], tuple[Scalar, Scalar]]
    ) -> tuple[tuple[Scalar, Scalar], tuple[Scalar, Scalar]]:
        item, ahead = cursors
        (sequence, block), slot = item, lax.rem(number, ring.num_buffers)
        low, high = sequences.low(sequence), end_ref[sequence]

        @pl.when(sequences.is_first(item))
        def _() -> None:
            softmax.reset()

        ring.wait(slot, block, low, high)
        ring.drop_unwritten(slot, block, low, high)
        local = sequence - first_sequence
        block_start = block * ring.block_tokens
        first_position = sequences.first_position(sequence)
        if one_row:
            # Of a part of a context the row may lie beyond the end.
            last_M1 = jnp.minimum(first_position, high - 1) if partial else first_position
        else:
            row_M1 = lax.broadcasted_iota(jnp.int32, (q_ref.shape[2], 1), 0) // queries_per_kv
            last_M1 = jnp.minimum(first_position + row_M1, high - 1)
        ahead = _reduce(
            ring,
            softmax,
            slot,
            q_ref.at[local],
            last_M1 - block_start,
            lambda: start(number + num_ahead, ahead),
        )

        @pl.when(sequences.is_last(item))
        def _() -> None:
            out_ref[local] = softmax.result().astype(out_ref.dtype)
            if logarithm_ref is not None:
                logarithm_ref[local] = softmax.logarithm()

        return sequences.advance(item), ahead

    out_ref[...] = jnp.zeros_like(out_ref)
    if logarithm_ref is not None:
        logarithm_ref[...] = jnp.full_like(logarithm_ref, MASKED)
    ring.clear()
    item = sequences.begin(first_sequence)
    lax.fori_loop(0, num_items, step, (item, lax.fori_loop(0, num_ahead, start, item)))


def _reduce(
    ring: PageRing, softmax: Softmax, slot: Scalar, q_ref: Ref, last_M1: Scalar, start_next: Callable[[], Any]
) -> Any:
    """Reduce the block in a buffer, and begin to fetch another. Returns what `start_next` does.

    The compiler lets no fetch overtake a load from any of the buffers. So it comes after the last load, and
    if registers can hold what that gets, before most of the arithmetic, with which its many scalar
    instructions then share bundles.
    """
    layout, compute = ring.layout, q_ref.dtype
    value_bytes = ring.block_tokens * softmax.out_ref.shape[-1] * jnp.dtype(layout.storage).itemsize
    started = None
    for head in range(layout.num_kv_heads):
        key_scales, value_scales = ring.scale_rows(slot, head)
        keys = [ring.operand(plane, compute) for plane in ring.keys(slot, head)]
        score = softmax.scores(q_ref[head], keys, key_scales, last_M1)
        values = ring.values(slot, head)
        is_last = head == layout.num_kv_heads - 1
        if is_last and value_bytes <= HALF_OF_REGISTERS:
            started = start_next()
        state = softmax.at(head, slice(None))
        weight, decay = state.weigh(score, value_scales, compute, masked=True)
        state.add(weight, decay, [ring.operand(plane, compute) for plane in values])
        if is_last and value_bytes > HALF_OF_REGISTERS:
            started = start_next()
    return started


def _without_logarithm(layout: PageLayout, refs: Sequence[Ref]) -> tuple[Ref, tuple[Ref, ...]]:
    """The reference to logarithms, and the others: it stands behind that to the result."""
    place = 3 if layout.quantised else 2
    return refs[place], (*refs[:place], *refs[place + 1 :])
