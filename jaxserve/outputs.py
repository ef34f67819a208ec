"""What a caller gets back: finished outputs, in the shape that vLLM's users know, and streamed deltas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxserve.scheduling.draft_tally import DraftTally
from jaxserve.scheduling.request import FinishReason


class Logprob(NamedTuple):
    """One token's log-probability at one position."""

    logprob: float
    """Natural logarithm."""
    rank: int
    """1 for the most likely token of the vocabulary."""
    decoded_token: str | None = None
    """The token's text, where the loop was given a way to decode it."""


TokenLogprobs = Mapping[int, Logprob]
"""At one position: the token that stands there, then the most likely ones, by token id."""


@dataclass(frozen=True, kw_only=True)
class RequestMetrics:
    """When things happened to a request, in seconds of `time.monotonic`; None for what never did."""

    arrival_time: float
    scheduled_time: float | None
    """First admission to a slot."""
    first_token_time: float | None
    finish_time: float
    num_preemptions: int
    """Times that any of its samples was preempted and recomputed."""

    @property
    def queue_seconds(self) -> float | None:
        """From arrival to admission."""
        return None if self.scheduled_time is None else self.scheduled_time - self.arrival_time

    @property
    def first_token_seconds(self) -> float | None:
        """From arrival to the first token."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def total_seconds(self) -> float:
        """From arrival to the end."""
        return self.finish_time - self.arrival_time


@dataclass(frozen=True, kw_only=True)
class CompletionOutput:
    """One sample."""

    index: int
    text: str
    """Without the stop string, the stop token and, usually, special tokens; "" from a loop without text."""
    token_ids: list[int]
    """Every sampled token, the one that ended the answer included."""
    logprobs: list[TokenLogprobs] | None
    """For each of `token_ids`, if asked for."""
    cumulative_logprob: float | None
    """Sum over `token_ids`, if log-probs were asked for."""
    finish_reason: FinishReason
    stop_reason: int | str | None
    """The stop token id or the stop string that matched; None for an end-of-sequence id."""


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """A finished request: the prompt and all of its samples."""

    request_id: str
    prompt: str | None
    """The prompt's text, where it was given as text."""
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprobs | None] | None
    """For each prompt token, None for the first, if asked for; shorter if the request was cut off."""
    outputs: list[CompletionOutput]
    seed: int
    """The seed in force, the request's own or the one drawn for it."""
    metrics: RequestMetrics
    num_cached_tokens: int = 0
    """Prompt tokens whose keys and values were found in the prefix cache when it first started."""
    drafts: DraftTally = field(default_factory=DraftTally)
    """What drafting has brought its samples; all zero where nothing drafts."""
    finished: bool = True


class AnswerDelta(NamedTuple):
    """What one step added to one sample."""

    request_id: str
    index: int
    """Which of the request's samples."""
    token_ids: tuple[int, ...]
    text: str
    """Text that is certain now; held back while a stop string or a character may yet be completed."""
    logprobs: list[TokenLogprobs] | None
    """For each of `token_ids`, if asked for."""
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """With the first delta of sample 0, if asked for."""
    output: RequestOutput | None = None
    """The whole request, with the delta that ends its last sample."""
