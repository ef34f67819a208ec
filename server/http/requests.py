"""What a body becomes once it has been read: the same for chat and completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.plan import SamplingParams
from jaxserve.text import Message
from server.http.parameters import StreamOptions
from server.http.tools import ToolUse


@dataclass(frozen=True)
class TextPrompt:
    text: str
    add_special_tokens: bool = True


@dataclass(frozen=True)
class TokensPrompt:
    token_ids: list[int]


@dataclass(frozen=True)
class ChatPrompt:
    messages: Sequence[Message]
    variables: Mapping[str, Any]
    """Of the chat template, by name."""


PromptInput = TextPrompt | TokensPrompt | ChatPrompt


@dataclass(frozen=True)
class Call:
    """One HTTP request: its prompts are answered side by side with the same parameters."""

    model: str | None
    """As the client named it; None for whatever is served."""
    prompts: tuple[PromptInput, ...]
    params: SamplingParams
    stream: StreamOptions
    return_token_ids: bool
    """vLLM's addition: token ids beside the text."""
    tools: ToolUse | None = None
    """Chat: what the answer may call."""
    until_full: bool = False
    """The answer may take what the prompt leaves of the context, whatever the parameters say."""
    echo: bool = False
    """Completions: the text begins with the prompt."""
    return_prompt_logprobs: bool = False
    """vLLM's addition; with echo, the parameters may ask for them when the client did not."""
