"""Teacher-forced comparison: both models read the same text, and their distributions meet on the device.

Axes: T rows of a chunk, R logit rows at a time, D hidden, V vocabulary.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.engine.build import layer_loop_for, local_target
from jaxserve.engine.shardings import cache_shardings
from jaxserve.evaluation.sides import Side, require_same_vocabulary
from jaxserve.model.cache import Cache, make_cache, page_layouts
from jaxserve.model.rows import sequence_rows
from jaxserve.model.transformer import Params, Transformer
from jaxserve.text.windows import Window
from sharding import make_mesh

Scored = jax.Array | npt.NDArray[Any]
"""On the device while they are computed, on the host after."""
LOGIT_ROWS = 64
"""Distributions compared at a time: two times 64 rows of 50,000 floats are 25 MB."""


@flax.struct.dataclass
class TokenScores:
    """One entry for each scored token, in the order of the text; natural logarithms."""

    model_nll: Scored
    """Negative log-likelihood of the token that follows."""
    reference_nll: Scored
    kl: Scored
    """Of the model's next-token distribution from the reference's: KL(reference || model)."""
    agrees: Scored
    """Whether both hold the same token for the most likely."""


@dataclass(frozen=True)
class Scores:
    """What a text gave, and what it took."""

    tokens: TokenScores
    model_seconds: float
    """Of the model's forward passes and logits; the comparison is in neither."""
    reference_seconds: float


class Scorer:
    """Reads windows with two models, chunk by chunk, with the engine's own forward pass."""

    def __init__(self, model: Side, reference: Side, *, context: int) -> None:
        """Load and compile.

        Args:
            model: the one that is judged.
            reference: the one that it is judged by.
            context: tokens of the longest window.

        Raises ValueError for vocabularies of two sizes, or a context that a model does not reach.
        """
        require_same_vocabulary(model, reference)
        self._model = _Reader(model, context)
        self._reference = _Reader(reference, context)
        if self._model.chunk_rows != self._reference.chunk_rows:
            raise ValueError(
                f"chunks of {self._model.chunk_rows} rows cannot be compared with chunks of "
                f"{self._reference.chunk_rows}"
            )
        logits = jax.ShapeDtypeStruct((LOGIT_ROWS, model.config.model.vocab_size), jnp.float32)
        target = jax.ShapeDtypeStruct((LOGIT_ROWS,), jnp.int32)
        self._compare = jax.jit(compare_distributions).lower(logits, logits, target).compile()

    def score(
        self, windows: Sequence[Window], on_window: Callable[[int], object] = lambda num_tokens: None
    ) -> Scores:
        """Compare both models on windows no longer than the context.

        `on_window` is called after each with the tokens that it scored.
        """
        before = self._model.seconds, self._reference.seconds
        scored: list[TokenScores] = []
        for window in windows:
            scored += self._score_window(window.token_ids)
            on_window(len(window.token_ids) - 1)
        return Scores(
            jax.tree.map(lambda *parts: np.concatenate(parts), *scored),
            self._model.seconds - before[0],
            self._reference.seconds - before[1],
        )

    def _score_window(self, ids: npt.NDArray[np.int32]) -> Iterator[TokenScores]:
        chunk = self._model.chunk_rows
        for start in range(0, len(ids) - 1, chunk):
            tokens = ids[start : min(start + chunk, len(ids) - 1)]
            targets = ids[start + 1 : start + 1 + len(tokens)]
            self._model.read(tokens, start)
            self._reference.read(tokens, start)
            for first in range(0, len(tokens), LOGIT_ROWS):
                target = targets[first : first + LOGIT_ROWS]
                logits = self._model.logits(first), self._reference.logits(first)
                yield _first_rows(self._compare(*logits, _padded(target, LOGIT_ROWS)), len(target))


def compare_distributions(model_RV: jax.Array, reference_RV: jax.Array, target_R: jax.Array) -> TokenScores:
    """Float32 logits of both models, and the tokens that follow, as scores on the device."""
    model_RV = jax.nn.log_softmax(model_RV)
    reference_RV = jax.nn.log_softmax(reference_RV)

    def nll(logprobs_RV: jax.Array) -> jax.Array:
        return -jnp.take_along_axis(logprobs_RV, target_R[:, None], axis=-1)[:, 0]

    kl_R = jnp.sum(jnp.exp(reference_RV) * (reference_RV - model_RV), axis=-1)
    agrees_R = jnp.argmax(model_RV, axis=-1) == jnp.argmax(reference_RV, axis=-1)
    # Rounding may put the divergence of two like distributions below 0, where none is; NaN stays NaN.
    return TokenScores(nll(model_RV), nll(reference_RV), jnp.maximum(kl_R, 0.0), agrees_R)


class _Reader:
    """One model reading one sequence: its pages, its compiled programs, the chunk that it read last."""

    def __init__(self, side: Side, context: int) -> None:
        config = side.configure(max_model_len=context)
        # A window's group gives pages back that are behind it; here all of the text stays.
        num_pages = 1 + -(-context // config.cache.page_size)
        cache = replace(config.cache, num_pages=(max(num_pages, 2),) * len(config.model.windows))
        config = replace(config, cache=cache)
        layouts = page_layouts(config, jax.default_backend())
        mesh = make_mesh(config.mesh)
        target = local_target()
        layer_loop = layer_loop_for(target, spread=mesh is not None)
        transformer = Transformer(config, layouts, layer_loop, mesh, target)
        make = functools.partial(make_cache, config, layouts)
        whole, places = None, None
        if mesh is not None:
            whole, places = NamedSharding(mesh, PartitionSpec()), cache_shardings(jax.eval_shape(make), mesh)
        self.chunk_rows = config.chunk_rows[-1]
        self.seconds = 0.0
        self._params = side.params
        self._cache = jax.jit(make, out_shardings=places)()
        hidden = jax.eval_shape(
            functools.partial(read_chunk, transformer),
            *(self._params, self._cache, jnp.zeros(self.chunk_rows, jnp.int32), 0, 0),
        )[0]
        hidden = jax.ShapeDtypeStruct(hidden.shape, hidden.dtype, sharding=whole)
        tokens = jax.ShapeDtypeStruct((self.chunk_rows,), jnp.int32, sharding=whole)
        number = jax.ShapeDtypeStruct((), jnp.int32, sharding=whole)
        self._hidden_TD = jnp.zeros(hidden.shape, hidden.dtype, device=whole)
        self._read = (
            jax.jit(
                functools.partial(read_chunk, transformer), donate_argnums=1, out_shardings=(whole, places)
            )
            .lower(self._params, self._cache, tokens, number, number)
            .compile()
        )
        self._logits = (
            jax.jit(functools.partial(chunk_logits, transformer), out_shardings=whole)
            .lower(self._params, hidden, number)
            .compile()
        )

    def read(self, tokens: npt.NDArray[np.int32], start: int) -> None:
        """Read the tokens at `start` and after, those before having been read."""
        started = time.monotonic()
        padded = _padded(tokens, self.chunk_rows)
        self._hidden_TD, self._cache = self._read(
            self._params, self._cache, padded, np.int32(start), np.int32(len(tokens))
        )
        self._hidden_TD.block_until_ready()
        self.seconds += time.monotonic() - started

    def logits(self, first: int) -> jax.Array:
        """Float32 `[R, V]` of the chunk's rows from `first` on; beyond its end whatever is there."""
        started = time.monotonic()
        logits_RV = self._logits(self._params, self._hidden_TD, np.int32(first))
        logits_RV = jax.device_put(logits_RV, jax.devices()[0])  # The other model may have another mesh.
        logits_RV.block_until_ready()
        self.seconds += time.monotonic() - started
        return logits_RV


def read_chunk(
    transformer: Transformer,
    params: Params,
    cache: Cache,
    token_T: jax.Array,
    start: jax.Array,
    num_tokens: jax.Array,
) -> tuple[jax.Array, Cache]:
    """One sequence's next tokens: hidden states `[T, D]`, and the caches with them written; see
    `sequence_rows`."""
    rows = sequence_rows(transformer.config, token_T.shape[0], start, num_tokens)
    return transformer.forward(params, cache, token_T, rows, single=False)


def chunk_logits(
    transformer: Transformer, params: Params, hidden_TD: jax.Array, first: jax.Array
) -> jax.Array:
    """Float32 `[R, V]` of the rows from `first` on; beyond the chunk's end the last row's."""
    row_R = jnp.minimum(first + jnp.arange(LOGIT_ROWS, dtype=jnp.int32), hidden_TD.shape[0] - 1)
    return transformer.logits(params, hidden_TD[row_R])


def _first_rows(scores: TokenScores, num_rows: int) -> TokenScores:
    """Scores brought to the host, the padding dropped."""
    return jax.tree.map(lambda x: np.asarray(x)[:num_rows], scores)


def _padded(values: npt.NDArray[np.int32], length: int) -> npt.NDArray[np.int32]:
    return np.pad(values, (0, length - len(values)))
