"""What a user may hand in as a prompt, and what the host loop is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

import numpy as np

from jaxserve.plan import SamplingParams
from jaxserve.text import Message, Tokenizer


class TextPrompt(TypedDict):
    """A text to encode."""

    prompt: str


class _TokensPromptText(TypedDict, total=False):
    prompt: str
    """The text, for the record."""


class TokensPrompt(_TokensPromptText):
    """Token ids, given to the model as they are."""

    prompt_token_ids: Sequence[int]


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt
Conversation = Sequence[Message]


class EncodedPrompt(NamedTuple):
    """A prompt as the host loop takes it."""

    token_ids: Sequence[int]
    text: str | None
    """For the record, where it was given."""


def list_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list. An empty list is no prompt, not an empty one."""
    if isinstance(prompts, str | Mapping) or _is_token_ids(prompts):
        return [prompts]  # type: ignore[list-item]
    if not isinstance(prompts, Sequence):
        raise ValueError(f"prompts is {prompts!r}; expected a prompt or a list of prompts")
    return list(prompts)  # type: ignore[arg-type]


def list_conversations(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
    """One conversation or several, as a list."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise ValueError(f"messages is {messages!r}; expected a list of messages, or of such lists")
    if any(isinstance(message, Mapping) for message in messages):
        return [messages]  # type: ignore[list-item]
    return list(messages)  # type: ignore[arg-type]


def list_params(params: SamplingParams | Sequence[SamplingParams], num_prompts: int) -> list[SamplingParams]:
    """Sampling parameters for each prompt. Raises ValueError unless there are one or as many as prompts."""
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    listed = list(params)
    for index, one in enumerate(listed):
        if not isinstance(one, SamplingParams):
            raise TypeError(f"sampling_params[{index}] is {one!r}; expected SamplingParams")
    if len(listed) != num_prompts:
        raise ValueError(
            f"{len(listed)} sampling_params for {num_prompts} prompts: give one for all, or one for each"
        )
    return listed


def encode_prompt(prompt: Prompt, tokenizer: Tokenizer) -> EncodedPrompt:
    """Text becomes token ids, with a beginning-of-sequence token where the model expects one.

    Raises ValueError for what is no prompt.
    """
    if isinstance(prompt, str):
        return EncodedPrompt(tokenizer.encode(prompt), prompt)
    match prompt:
        case {"prompt_token_ids": ids, "prompt": str(text), **rest} if not rest:
            return EncodedPrompt(_checked_ids(ids), text)
        case {"prompt_token_ids": ids, **rest} if not rest:
            return EncodedPrompt(_checked_ids(ids), None)
        case {"prompt": str(text), **rest} if not rest:
            return EncodedPrompt(tokenizer.encode(text), text)
        case Mapping():
            raise ValueError(
                f"a prompt has the keys {sorted(map(str, prompt))}; expected prompt, a text, "
                "or prompt_token_ids"
            )
        case Sequence() | np.ndarray():
            return EncodedPrompt(_checked_ids(prompt), None)
    raise ValueError(f"a prompt is {prompt!r}; expected a text, a list of token ids, or a dictionary")


def _checked_ids(ids: Any) -> Any:
    """What may be token ids, which the host loop looks at one by one, and is not several prompts."""
    first = next(iter(ids), None) if isinstance(ids, Sequence) else None
    if isinstance(first, str | Mapping | Sequence):
        raise ValueError(
            f"a prompt is a list that begins with {first!r}; expected token ids: `generate` and `chat` "
            "answer several prompts, `stream` and `stream_chat` one"
        )
    return ids


def _is_token_ids(prompts: object) -> bool:
    if isinstance(prompts, np.ndarray):
        return prompts.ndim == 1
    return isinstance(prompts, Sequence) and len(prompts) > 0 and isinstance(prompts[0], int | np.integer)
