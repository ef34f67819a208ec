"""The two models of an evaluation, and what each of them weighs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import jax

from jaxserve.config import EngineConfig
from jaxserve.engine.build import EngineOptions, build_engine, configure, load_parameters
from jaxserve.model.cache import layer_places, page_layouts
from jaxserve.model.transformer import Params
from jaxserve.offline import OfflineLoop
from jaxserve.opened_model import OpenedModel, loop_of
from jaxserve.outputs import RequestOutput
from jaxserve.plan import SamplingParams
from jaxserve.progress import StageBars
from jaxserve.prompts import EncodedPrompt
from jaxserve.text import Message, Tokenizer


@dataclass(frozen=True)
class Footprint:
    """What a model costs beside its quality."""

    weight_bytes: int
    kv_bytes_per_token: float
    """Of all layers together, scales included."""


@dataclass(frozen=True)
class Generation:
    """Answers to some prompts, and what they took."""

    outputs: Sequence[RequestOutput]
    seconds: float
    """From the first prompt to the last answer, all of them batched."""

    @property
    def num_tokens(self) -> int:
        return sum(len(output.outputs[0].token_ids) for output in self.outputs)


class Side:
    """One of the two models. Its weights are read once, when first needed, for all that it does."""

    def __init__(
        self, name: str, model: OpenedModel, options: EngineOptions, *, progress: bool = False
    ) -> None:
        """Nothing is loaded yet.

        Args:
            name: what the report calls it.
            model: from `open_model`.
            options: how it runs, when it answers; scoring takes all but the sizes from them.
            progress: show bars on standard error while it loads.

        Raises ValueError for options that the model or the machine cannot meet.
        """
        self.name = name
        self.options = options
        self.config: EngineConfig = configure(model.checkpoint, options)
        self._model = model
        self._progress = progress

    @property
    def tokenizer(self) -> Tokenizer:
        return self._model.tokenizer

    @cached_property
    def params(self) -> Params:
        """The model's parameters on the device."""
        with StageBars(self._progress) as bars:
            return load_parameters(self._model.checkpoint, self.config, bars)

    def configure(self, *, max_model_len: int) -> EngineConfig:
        """The config of one sequence at a time of so many tokens, for which the same parameters serve.

        Raises ValueError for a length beyond the model's.
        """
        options = replace(self.options, max_model_len=max_model_len, num_slots=1, kv_memory=None)
        return configure(self._model.checkpoint, options, loaded=True)

    def footprint(self) -> Footprint:
        """Its bytes as they lie on the device."""
        config, model = self.config, self.config.model
        groups = [place.group for place in layer_places(model)]
        layouts = page_layouts(config, jax.default_backend())
        page_bytes = sum(
            replace(layout, num_pages=1).num_bytes(groups.count(number))
            for number, layout in enumerate(layouts)
        )
        weights = sum(leaf.nbytes for leaf in jax.tree.leaves(self.params))
        return Footprint(weights, page_bytes / config.cache.page_size)

    def encode(self, messages: Sequence[Message]) -> EncodedPrompt:
        """A conversation through the chat template; without one, its last message as plain text.

        Raises ValueError for one that leaves no room for an answer.
        """
        templated = "default" in self.tokenizer.chat_templates
        text = self.tokenizer.render_chat(messages) if templated else str(messages[-1]["content"])
        ids = self.tokenizer.encode(text, add_special_tokens=not templated)
        if len(ids) >= self.config.max_model_len:
            raise ValueError(
                f"a prompt of {len(ids)} tokens leaves no room for an answer: max_model_len is "
                f"{self.config.max_model_len}"
            )
        return EncodedPrompt(ids, text)

    def generate(
        self,
        prompts: Sequence[EncodedPrompt],
        params: SamplingParams,
        on_answer: Callable[[], object] = lambda: None,
    ) -> Generation:
        """Answer prompts, batched as far as slots and pages allow; `on_answer` is called after each.

        The engine is made for it, and its KV pool given back at the end; the weights stay. Raises ValueError,
        naming the value and the limit, for a prompt that could never be answered.
        """
        with StageBars(self._progress) as bars:
            engine = build_engine(self._model.checkpoint, self.options, params=self.params, on_progress=bars)
        loop = OfflineLoop(loop_of(self._model, engine, self.options))
        for prompt in prompts:
            loop.check(prompt.token_ids, params)
        started = time.monotonic()
        outputs = loop.generate(prompts, [params] * len(prompts), lambda output: on_answer())
        return Generation(outputs, time.monotonic() - started)


def require_same_vocabulary(model: Side, reference: Side) -> None:
    """Raise ValueError, naming both sizes, unless the next-token distributions can be compared."""
    sizes = [side.config.model.vocab_size for side in (model, reference)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"{model.name} has a vocabulary of {sizes[0]} tokens and {reference.name} one of {sizes[1]}: "
            "their distributions cannot be compared"
        )
