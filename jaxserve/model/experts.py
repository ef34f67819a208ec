"""Mixture of experts: no token is dropped, and no expert is multiplied that no token chose."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxserve.config import ModelConfig
from jaxserve.model.layers import Weight, product_flat
from jaxserve.model.parameters import EXPERT_NAMES, ParameterInfo, expert_parameters
from jaxserve.model.spread import cut_by, weight_specs
from pallas_kernels.dispatch import Target
from pallas_kernels.gated_activation import gated_activation
from pallas_kernels.grouped_mlp import grouped_mlp
from sharding import (
    from_all_replicas,
    inside_shard,
    per_shard,
    replica_index,
    shard_index,
    shard_sum,
    sum_to_replicas,
)

LEAST_TILE_ROWS, MOST_TILE_ROWS = 16, 256


def route(x_TD: jax.Array, router_ED: jax.Array, model: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """The experts `[T, k]` of each row, likeliest first, and their weights `[T, k]` in float32.

    Softmax over all experts, then the top k, renormalised where the model says so (for Mixtral that is
    the same as its softmax over the chosen ones).
    """
    score_TE = jnp.einsum("td,ed->te", x_TD.astype(jnp.float32), router_ED, precision="highest")
    weight_Tk, expert_Tk = jax.lax.top_k(jax.nn.softmax(score_TE, axis=-1), model.experts_per_token)
    if model.norm_topk:
        weight_Tk = weight_Tk / jnp.sum(weight_Tk, axis=-1, keepdims=True)
    return expert_Tk.astype(jnp.int32), weight_Tk


def expert_tile_rows(num_rows: int, model: ModelConfig, target: Target, *, exact: bool) -> int:
    """How many rows of an expert are multiplied at a time.

    A tile reads its expert's matrices from main memory, which takes a TPU or GPU as long as to multiply them
    with some 256 rows (`benchmarks/results/tpu-experts.json`): an expert is to have few tiles, about as large
    as its rows are many on the mean. Larger ones take longer to compile. On a CPU tiles stay at 16.

    Args:
        num_rows: of the batch.
        model: its experts.
        target: the device.
        exact: the same number for every batch, so that sums are in one order.
    """
    if exact:
        return LEAST_TILE_ROWS
    mean = -(-num_rows * model.experts_per_token // model.num_experts)
    most = LEAST_TILE_ROWS if target.platform == "cpu" else MOST_TILE_ROWS
    wanted = 1 << (mean - 1).bit_length()
    return min(max(LEAST_TILE_ROWS, min(wanted, most)), num_rows)


def expert_mlp(
    x_TD: jax.Array,
    valid_T: jax.Array,
    router_ED: jax.Array,
    gate_up_LE2FD: Weight,
    down_LEDF: Weight,
    layer: jax.Array | int,
    model: ModelConfig,
    *,
    target: Target,
    exact: bool,
    mesh: Mesh | None = None,
    num_here: int | None = None,
) -> jax.Array:
    """`[T, D]`: each row through its experts, weighted.

    Args:
        x_TD: rows; those not `valid_T` are padding and reach no expert.
        router_ED: float32 router of this layer.
        gate_up_LE2FD: the experts of one or more layers.
        down_LEDF: likewise.
        layer: which of these layers it is.
        target: the kind of the devices.
        exact: sums are in one order, whatever the batch.
        mesh: the devices over which the experts are spread; each runs its own, or its slice of each, and the
            results are added up.
        num_here: experts that these devices have, where replicas share them out (`experts_of_replica`): each
            replica runs its own on the rows of all, and gets the sum of what becomes of its rows. None: all.
    """
    expert_Tk, weight_Tk = route(x_TD, router_ED, model)
    # Padding chooses an expert that no device has.
    expert_Tk = jnp.where(valid_T[:, None], expert_Tk, model.num_experts)
    num_here = num_here or model.num_experts
    shared = num_here < model.num_experts
    if shared:
        x_TD, expert_Tk, weight_Tk = _of_all_replicas(x_TD, expert_Tk, weight_Tk)
        expert_Tk -= replica_index() * num_here
    infos = [_with_experts(expert_parameters(model)[name], num_here) for name in EXPERT_NAMES]
    run_own = functools.partial(
        _own_experts,
        model=model,
        tile_rows=expert_tile_rows(x_TD.shape[0], model, target, exact=exact),
        mesh=mesh,
        target=target,
        axis=cut_by(infos[0], mesh).axes[0],
        shared=shared,
    )
    layer = jnp.asarray(layer, jnp.int32)
    if inside_shard(mesh):
        return run_own(x_TD, expert_Tk, weight_Tk, gate_up_LE2FD, down_LEDF, layer)
    specs = [
        weight_specs(stack, info, mesh) for stack, info in zip((gate_up_LE2FD, down_LEDF), infos, strict=True)
    ]
    run = per_shard(run_own, mesh, in_axes=((), (), (), *specs, ()), out_axes=())
    return run(x_TD, expert_Tk, weight_Tk, gate_up_LE2FD, down_LEDF, layer)


def _own_experts(
    x_TD: jax.Array,
    expert_Tk: jax.Array,
    weight_Tk: jax.Array,
    gate_up_LE2FD: Weight,
    down_LEDF: Weight,
    layer: jax.Array,
    *,
    model: ModelConfig,
    tile_rows: int,
    mesh: Mesh | None,
    target: Target | None,
    axis: str | None,
    shared: bool,
) -> jax.Array:
    """`[T, D]`: the sum over all devices, each of which sees its part of the experts.

    `axis` is the logical one that tells which experts a device has. `shared`: rows are those of all replicas,
    of which this one's come back.
    """
    num_own = jax.tree.leaves(gate_up_LE2FD)[0].shape[1]
    expert_M = expert_Tk.reshape(-1) - shard_index(axis or "", mesh) * num_own
    # Other devices' experts, and padding, sort behind every one of ours and are counted in no group.
    expert_M = jnp.where((expert_M >= 0) & (expert_M < num_own), expert_M, num_own)
    order_M = jnp.argsort(expert_M, stable=True).astype(jnp.int32)
    own_E = jnp.arange(num_own, dtype=jnp.int32)
    out_TD = grouped_mlp(
        x_TD,
        order_M // model.experts_per_token,
        weight_Tk.reshape(-1)[order_M],
        _joined(gate_up_LE2FD),
        _joined(down_LEDF),
        jnp.sum(expert_M[:, None] == own_E[None], axis=0, dtype=jnp.int32),
        layer * num_own,
        multiply=product_flat,
        activate=functools.partial(gated_activation, activation=model.activation, target=target),
        tile_rows=tile_rows,
    )
    out_TD = out_TD.astype(x_TD.dtype)
    # Replicas first, so that the other devices have fewer rows to add up.
    return shard_sum(sum_to_replicas(out_TD) if shared else out_TD, "experts", mesh)


def _of_all_replicas(
    x_TD: jax.Array, expert_Tk: jax.Array, weight_Tk: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The rows of all replicas, and what they have chosen, in two exchanges."""
    bits_Tk = jax.lax.bitcast_convert_type(weight_Tk, jnp.int32)
    chosen_T2k = from_all_replicas(jnp.concatenate([expert_Tk, bits_Tk], axis=1))
    expert_Tk, bits_Tk = jnp.split(chosen_T2k, 2, axis=1)
    return from_all_replicas(x_TD), expert_Tk, jax.lax.bitcast_convert_type(bits_Tk, jnp.float32)


def _with_experts(info: ParameterInfo, num_experts: int) -> ParameterInfo:
    """The parameter of so many, which come first."""
    return dataclasses.replace(info, shape=(num_experts, *info.shape[1:]))


def _joined(stack: Weight) -> Weight:
    """`[L, E, ...]` as `[L * E, ...]`, whatever belongs to the matrices included."""
    return jax.tree.map(lambda array: array.reshape(-1, *array.shape[2:]), stack)
