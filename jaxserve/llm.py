"""The library's face for work that is there all at once, in the shape that vLLM's users know."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, TypeVar, Unpack

from tqdm.auto import tqdm  # pyright: ignore[reportMissingModuleSource]

from jaxserve.config import EngineConfig
from jaxserve.engine.engine import DeviceEngine
from jaxserve.engine.options import engine_options
from jaxserve.offline import AnswerIterator, OfflineLoop
from jaxserve.opened_model import EngineSettings, OpenedModel, loop_of, open_model
from jaxserve.outputs import RequestOutput
from jaxserve.plan import EngineLimits, SamplingParams
from jaxserve.prompts import (
    Conversation,
    EncodedPrompt,
    Prompt,
    encode_prompt,
    list_conversations,
    list_params,
    list_prompts,
)
from jaxserve.text import Tokenizer

_BAR_DELAY_SECONDS = 2.0
_T = TypeVar("_T")


@dataclass(frozen=True)
class _Running:
    """What an open LLM holds; gone when it is closed, and the device memory with it."""

    engine: DeviceEngine
    loop: OfflineLoop


class LLM:
    """A model, loaded and compiled, that answers on the caller's thread.

    Not safe for use from several threads: that is what `Engine` is for. Ctrl-C ends the call that it
    interrupts, aborts its requests and leaves the LLM usable.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | OpenedModel,
        *,
        overlap: bool = True,
        progress: bool = True,
        generation_config: Literal["auto", "none"] = "auto",
        prefix_caching: bool = True,
        **settings: Unpack[EngineSettings],
    ) -> None:
        """Find, load and compile a model.

        In a job of several processes (`sharding.processes.join`) every one calls this; those after the first
        do not return from it, and raise SystemExit when the first has ended.

        Args:
            model: a catalogue name (`smollm2-135m`), a folder in Hugging Face layout, a `.gguf` file, a
                hub id (`owner/name`), or what `open_model` returned.
            overlap: plan a step while the last one runs; answers are the same either way.
            progress: show bars on standard error while downloading, loading and compiling, if it takes long.
            generation_config: what answers calls without sampling parameters: "auto" takes the model's own
                defaults from its `generation_config.json`, "none" those of `SamplingParams`.
            prefix_caching: start prompts on what earlier ones that began alike have left in the KV pool;
                answers are the same either way.
            settings: fields of `jaxserve.engine.options.EngineOptions`: `max_model_len` (tokens), `num_slots`
                (sequences at once), `dtype`, `quantize` (a recipe, "int8" say), `kv_format`, `page_size`
                (tokens), `kv_memory` (bytes), `host_kv_memory` (bytes for pages that the KV pool has no
                room for), `num_pages`,
                `max_chunk` (token rows of the largest step), `deterministic`, `logprobs_mode`,
                `max_logprobs`, `speculative` ("ngram" drafts answers by looking them up in their own text,
                "ngram:TOKENS" also in the last so many tokens of answers before, "skip:N" by the model's
                first N layers, "draft:MODEL" by a second model with the same vocabulary, whose recipe is
                `draft_quantize`; answers are the same either way), `max_drafts` (tokens of an answer in a
                step), `mesh` and `prefill_mesh` (devices that share the model, and that compute prompts),
                `decode_groups` (sequences that decode in turn where the mesh has stages).

        Raises:
            TypeError: an argument that does not exist.
            ValueError: a model that cannot be read, or a setting that cannot be met, with the limit.
            PullError: a download failed.
        """
        if generation_config not in ("auto", "none"):
            raise ValueError(f"generation_config {generation_config!r} is not one of auto, none")
        options = engine_options(settings)
        if isinstance(model, str | os.PathLike):
            model = open_model(model, progress=progress)
        self._tokenizer = model.tokenizer
        defaults = model.sampling_defaults if generation_config == "auto" else {}
        self._default_params = SamplingParams(**defaults)
        engine = model.build_engine(options, progress=progress)
        loop = loop_of(model, engine, options, overlap=overlap, prefix_caching=prefix_caching)
        self._running: _Running | None = _Running(engine, OfflineLoop(loop))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer prompts, batched as far as the engine's slots and pages allow.

        Args:
            prompts: one, or a list; each a text, a list of token ids, `{"prompt": text}` or
                `{"prompt_token_ids": ids}`. Text gets a beginning-of-sequence token where the model
                expects one.
            sampling_params: for all prompts, or one for each; by default what `get_default_sampling_params`
                returns: without a recommendation of the model, temperature 1 and 16 tokens.
            use_tqdm: show a bar on standard error once the work has taken two seconds.

        Returns:
            One result for each prompt, in their order.

        Raises:
            ValueError: a prompt or its parameters could never be served; names the prompt's index, and
                nothing has been queued.
        """
        listed = list_prompts(prompts)
        encoded = [_numbered("prompt", i, encode_prompt, p, self._tokenizer) for i, p in enumerate(listed)]
        return self._answer("prompt", encoded, sampling_params, use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer conversations, each put into one prompt by the model's chat template.

        Args:
            messages: one conversation, a list of `{"role": ..., "content": ...}`; or a list of them.
            sampling_params: for all conversations, or one for each.
            add_generation_prompt: open the assistant's turn.
            tools: JSON schemas of functions, for templates that know tools.
            chat_template_kwargs: further variables for the template.
            use_tqdm: show a bar on standard error once the work has taken two seconds.

        Returns:
            One result for each conversation, in their order.

        Raises:
            ValueError: the model has no chat template, or a conversation could never be served; names its
                index, and nothing has been queued.
        """
        encoded = [
            _numbered(
                "conversation",
                index,
                self._encode_chat,
                conversation,
                add_generation_prompt,
                tools,
                chat_template_kwargs,
            )
            for index, conversation in enumerate(list_conversations(messages))
        ]
        return self._answer("conversation", encoded, sampling_params, use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> AnswerIterator:
        """Answer one prompt piece by piece.

        Args:
            prompt: as `generate` takes it.
            sampling_params: by default what `get_default_sampling_params` returns.

        Returns:
            An iterator over what each step adds: `.text`, `.token_ids`, `.index` of the sample, and with
            the last delta `.output`, the same result that `generate` gives. Closing it aborts the request.

        Raises:
            ValueError: the request could never be served.
        """
        return self._stream(encode_prompt(prompt, self._tokenizer), sampling_params)

    def stream_chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> AnswerIterator:
        """Answer one conversation piece by piece: arguments as for `chat`, the rest as for `stream`."""
        encoded = self._encode_chat(messages, add_generation_prompt, tools, chat_template_kwargs)
        return self._stream(encoded, sampling_params)

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def get_tokenizer(self) -> Tokenizer:
        """The same as `tokenizer`."""
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What a call without sampling parameters gets: the model's own recommendation, if it has one and
        `generation_config` does not say otherwise. `dataclasses.replace` makes variants of it."""
        return self._default_params

    @property
    def config(self) -> EngineConfig:
        """Everything that was compiled for, with every "auto" resolved."""
        return self._open.engine.config

    @property
    def limits(self) -> EngineLimits:
        """What a request must fit."""
        return self._open.engine.limits

    @property
    def compiles_after_ready(self) -> int:
        """Programs compiled since the LLM was ready; each one is a fault."""
        return self._open.engine.compiles_after_ready

    def check_integrity(self) -> None:
        """Raise RuntimeError unless pages, slots and requests account for one another.

        When no stream is open, this means that every page and slot is free.
        """
        self._open.loop.check_integrity()

    def close(self) -> None:
        """Abort what is open and let go of the device memory. No effect on a closed LLM."""
        if self._running is not None:
            self._running.loop.close()
            self._running = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _open(self) -> _Running:
        if self._running is None:
            raise RuntimeError("this LLM has been closed")
        return self._running

    def _answer(
        self,
        kind: str,
        prompts: Sequence[EncodedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        params = list_params(
            self._default_params if sampling_params is None else sampling_params, len(prompts)
        )
        loop = self._open.loop
        for index, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
            _numbered(kind, index, loop.check, prompt.token_ids, one)
        with tqdm(
            desc="Generating",
            unit=f" {kind}s",
            total=len(prompts),
            delay=_BAR_DELAY_SECONDS,
            disable=not use_tqdm,
        ) as bar:
            return loop.generate(prompts, params, lambda output: bar.update(1))

    def _stream(self, prompt: EncodedPrompt, sampling_params: SamplingParams | None) -> AnswerIterator:
        return self._open.loop.stream(prompt, sampling_params or self._default_params)

    def _encode_chat(
        self,
        messages: Conversation,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        chat_template_kwargs: Mapping[str, Any] | None,
    ) -> EncodedPrompt:
        text = self._tokenizer.render_chat(
            messages, add_generation_prompt, tools, **(chat_template_kwargs or {})
        )
        # The template is the authority on special tokens.
        return EncodedPrompt(self._tokenizer.encode(text, add_special_tokens=False), text)


def _numbered(kind: str, index: int, function: Callable[..., _T], *args: Any) -> _T:
    """Call a function; a ValueError that it raises says which prompt it is about."""
    try:
        return function(*args)
    except ValueError as error:
        raise ValueError(f"{kind} {index}: {error}") from error
