"""What the answers of both endpoints have in common."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote

from jaxserve.outputs import AnswerDelta, RequestOutput, TokenLogprobs
from server.core import Choice

Json = dict[str, Any]


@dataclass(frozen=True)
class Identity:
    """What every part of one answer says of itself."""

    id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))
    """Unix seconds."""

    def head(self, kind: str) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def new_name(prefix: str) -> str:
    """A name for an answer, which no other has."""
    return f"{prefix}-{uuid.uuid4().hex}"


def route_headers(choice: Choice) -> dict[str, str]:
    """Which model answers and why, as headers: of a receipt, what a client may want before the end."""
    reason = choice.reason.encode("ascii", "replace").decode()
    return {"x-jaxserve-route": quote(choice.route, safe="/:"), "x-jaxserve-route-reason": reason}


class AnswerFormat(Protocol):
    """Writes the answer to one call, whole or in chunks."""

    @property
    def plain(self) -> bool:
        """Whether the chunk of a delta that is a text and nothing else depends on that text and its place
        alone, and has it once and whole."""
        ...

    def whole(self, outputs: Sequence[RequestOutput]) -> Json:
        """The response body, from the finished requests in the order of the prompts."""
        ...

    def opening(self, prompts: Sequence[Sequence[int]]) -> list[Json]:
        """Chunks that come before every other, given the token ids of the prompts."""
        ...

    def chunk(self, prompt_index: int, delta: AnswerDelta) -> Json | None:
        """What a delta is on the wire; None if it has nothing to show."""
        ...

    def closing(self, usage: Json) -> Json:
        """The chunk that brings the usage alone."""
        ...


class Round(NamedTuple):
    """One token and the log-probabilities at its position, None where there are none."""

    token_id: int
    logprobs: TokenLogprobs | None


def rounds_of(token_ids: Iterable[int], logprobs: Iterable[TokenLogprobs | None]) -> list[Round]:
    return [Round(token_id, at) for token_id, at in zip(token_ids, logprobs, strict=True)]


def choice_end(finish_reason: str | None, stop_reason: int | str | None) -> Json:
    """How a choice ended, so far; `stop_reason` is vLLM's addition."""
    return {"finish_reason": finish_reason, "stop_reason": stop_reason}


def usage_json(prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0) -> Json:
    """`cached_tokens`: of the prompt's, those whose keys and values were reused."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def usage_of(outputs: Sequence[RequestOutput]) -> Json:
    """Tokens of finished requests; a prompt counts once for all of its samples."""
    return usage_json(
        sum(len(output.prompt_token_ids) for output in outputs),
        sum(len(sample.token_ids) for output in outputs for sample in output.outputs),
        sum(output.num_cached_tokens for output in outputs),
    )
