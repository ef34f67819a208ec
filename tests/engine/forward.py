"""Logits of whole prompts straight from the model, without a loop."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.config import CacheConfig, EngineConfig, ModelConfig
from jaxserve.model.cache import make_cache, page_layouts
from jaxserve.model.transformer import LayerLoop, Rows, Transformer

PAGE = 16
PAGES_EACH = 8


class PromptForward:
    """One ragged batch of prompts through a model, compiled once for each form of parameters."""

    def __init__(
        self, model: ModelConfig, prompts: list[np.ndarray], layer_loop: LayerLoop = "switched"
    ) -> None:
        num_pages = 1 + PAGES_EACH * len(prompts)
        self._config = EngineConfig(
            model=model,
            cache=CacheConfig(page_size=PAGE, num_pages=(num_pages,) * len(model.windows)),
            max_model_len=PAGES_EACH * PAGE,
            num_slots=len(prompts),
            decode_rows=(len(prompts),),
            chunk_rows=(128,),
        )
        self._prompts = prompts
        self._layouts = page_layouts(self._config, "cpu")
        self._transformer = Transformer(self._config, self._layouts, layer_loop)
        # A program that runs once or twice is not worth optimising.
        self._run = jax.jit(self._forward, compiler_options={"xla_backend_optimization_level": 0})

    def logits(self, params: Any) -> list[np.ndarray]:
        """[P, V] of each prompt."""
        logits = np.asarray(self._run(params, jnp.asarray(np.concatenate(self._prompts))))
        return np.split(logits, np.cumsum([len(prompt) for prompt in self._prompts])[:-1])

    def _forward(self, params: Any, tokens: jax.Array) -> jax.Array:
        cache = make_cache(self._config, self._layouts)
        hidden, _ = self._transformer.forward(params, cache, tokens, self._rows(), single=False)
        return self._transformer.logits(params, hidden)

    def _rows(self) -> Rows:
        num_prompts, num_groups = len(self._prompts), len(self._layouts)
        lengths = np.array([len(prompt) for prompt in self._prompts], np.int32)
        position = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
        sequence = np.repeat(np.arange(num_prompts, dtype=np.int32), lengths)
        table = 1 + np.arange(num_prompts * PAGES_EACH, dtype=np.int32).reshape(num_prompts, PAGES_EACH)
        return Rows(
            position_T=jnp.asarray(position),
            valid_T=jnp.ones(len(position), jnp.bool_),
            page_TG=(jnp.asarray(table[sequence, position // PAGE]),) * num_groups,
            page_table=(jnp.asarray(table),) * num_groups,
            query_start_S1=jnp.asarray(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)),
            context_len_S=jnp.asarray(lengths),
        )
