"""The two ends of a model, of which a device has the part for its part of the vocabulary."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxserve.config import FloatFormat, ModelConfig
from jaxserve.model.layers import product_flat, take_rows
from jaxserve.model.parameters import model_parameters
from jaxserve.model.spread import weight_specs
from pallas_kernels.dispatch import Target
from sharding import per_shard, shard_index, shard_sum


def embed(
    table_VD: Any, token_T: jax.Array, model: ModelConfig, compute_format: FloatFormat, mesh: Mesh | None
) -> jax.Array:
    """`[T, D]` the tokens' embeddings in the compute format."""
    dtype = jnp.dtype(compute_format)
    if mesh is None:
        return take_rows(table_VD, token_T, dtype)

    def own(table_VD: Any, token_T: jax.Array) -> jax.Array:
        num_own = jax.tree.leaves(table_VD)[0].shape[0]
        row_T = jnp.clip(token_T, 0, model.vocab_size - 1)
        row_T -= shard_index("vocab", mesh) * num_own
        is_own_T = (row_T >= 0) & (row_T < num_own)
        x_TD = take_rows(table_VD, jnp.where(is_own_T, row_T, 0), dtype)
        return shard_sum(jnp.where(is_own_T[:, None], x_TD, 0), "vocab", mesh)

    run = per_shard(own, mesh, in_axes=(_table_specs(table_VD, model, mesh), ()), out_axes=())
    return run(table_VD, token_T)


def head_logits(
    table_VD: Any, normed_RD: jax.Array, model: ModelConfig, mesh: Mesh | None, target: Target
) -> jax.Array:
    """Float32 `[R, V]` of normed hidden states, cut by vocabulary on a mesh."""
    multiply = functools.partial(product_flat, target=target)
    specs = _table_specs(table_VD, model, mesh)
    run = per_shard(multiply, mesh, in_axes=((), specs), out_axes=(None, "vocab"))
    logits_RV = run(normed_RD, table_VD)
    if model.logit_softcap:
        logits_RV = model.logit_softcap * jnp.tanh(logits_RV / model.logit_softcap)
    return logits_RV


def _table_specs(table_VD: Any, model: ModelConfig, mesh: Mesh | None) -> Any:
    """Of the embedding or the head, which lie alike."""
    return weight_specs(table_VD, dict(model_parameters(model))["embed"], mesh)
