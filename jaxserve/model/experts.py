"""Mixture of experts: no token is dropped, and no expert is multiplied that no token chose."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxserve.config import ModelConfig
from jaxserve.model.layers import swiglu
from pallas_kernels.grouped_matmul import grouped_matmul


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


def expert_mlp(
    x_TD: jax.Array,
    valid_T: jax.Array,
    router_ED: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    first_group: jax.Array | int,
    model: ModelConfig,
    *,
    tile_rows: int,
) -> jax.Array:
    """`[T, D]`: each row through its experts, weighted.

    Args:
        x_TD: rows; those not `valid_T` are padding and reach no expert.
        router_ED: float32 router of this layer.
        gate_up: `[X, 2, F, D]`, the experts of one or more layers in one stack.
        down: `[X, D, F]`, likewise.
        first_group: index of this layer's first expert in the stacks.
        tile_rows: rows of one expert multiplied at a time.
    """
    num_rows, hidden = x_TD.shape
    num_choices = model.experts_per_token
    expert_Tk, weight_Tk = route(x_TD, router_ED, model)
    # Padding sorts behind every expert, and is counted in no group.
    expert_M = jnp.where(valid_T[:, None], expert_Tk, model.num_experts).reshape(-1)
    order_M = jnp.argsort(expert_M, stable=True)
    group_sizes_E = jnp.sum(
        expert_M[:, None] == jnp.arange(model.num_experts, dtype=jnp.int32)[None], axis=0, dtype=jnp.int32
    )
    x_MD = x_TD[order_M // num_choices]
    gate_up_XND = gate_up.reshape(gate_up.shape[0], -1, hidden)
    gate_up_MN = grouped_matmul(x_MD, gate_up_XND, group_sizes_E, first_group, tile_rows=tile_rows)
    hidden_MF = swiglu(gate_up_MN.reshape(gate_up_MN.shape[0], 2, -1), model.activation)
    out_MD = grouped_matmul(hidden_MF, down, group_sizes_E, first_group, tile_rows=tile_rows)
    # Back to the rows' own order, so that a row sums its experts likeliest first whatever shares its step.
    out_TkD = jnp.zeros_like(out_MD).at[order_M].set(out_MD).reshape(num_rows, num_choices, hidden)
    weighted_TkD = out_TkD.astype(jnp.float32) * weight_Tk[..., None]
    total_TD = weighted_TkD[:, 0]
    for choice in range(1, num_choices):
        total_TD = total_TD + weighted_TkD[:, choice]
    return jnp.where(valid_T[:, None], total_TD, 0.0).astype(x_TD.dtype)
