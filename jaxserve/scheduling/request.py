"""What the host keeps of a request: its tokens, its state, and how it may end.

There is no prefill and no decode phase. A request has *known* tokens (prompt and sampled) and *computed*
ones (their keys and values are in the pool, or will be once the steps already planned have run); every
step moves computed towards known.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from jaxserve.plan import SamplingParams
from jaxserve.scheduling.draft_tally import DraftTally
from jaxserve.scheduling.pages import PageTable
from jaxserve.scheduling.terms import DEFAULT_TERMS, ServiceTerms

FinishReason = Literal["stop", "length", "abort", "expired", "error"]


class RequestState(Enum):
    WAITING = "waiting"
    """Not admitted yet: it has no slot."""
    RUNNING = "running"
    """In a slot, with pages."""
    PREEMPTED = "preempted"
    """Was running, gave up slot and pages, and waits to recompute its known tokens."""
    STOPPED = "stopped"
    """Ended by an end-of-sequence id, a stop token id or a stop string."""
    EXHAUSTED = "exhausted"
    """Ended by max_tokens or by the longest sequence that the engine holds."""
    ABORTED = "aborted"
    """Ended by its caller."""
    EXPIRED = "expired"
    """Ended by its deadline."""
    FAILED = "failed"
    """Ended by an error of the engine."""


FINISH_REASONS: dict[RequestState, FinishReason] = {
    RequestState.STOPPED: "stop",
    RequestState.EXHAUSTED: "length",
    RequestState.ABORTED: "abort",
    RequestState.EXPIRED: "expired",
    RequestState.FAILED: "error",
}

COMPLETE = frozenset({RequestState.STOPPED, RequestState.EXHAUSTED})
"""The ends of answers that nobody cut off."""
_ENDS = frozenset(FINISH_REASONS)
TRANSITIONS: dict[RequestState, frozenset[RequestState]] = {
    RequestState.WAITING: frozenset(
        {RequestState.RUNNING, RequestState.ABORTED, RequestState.EXPIRED, RequestState.FAILED}
    ),
    RequestState.RUNNING: _ENDS | {RequestState.PREEMPTED},
    # A step in flight at the time of the preemption may still bring the token that ends the request.
    RequestState.PREEMPTED: _ENDS | {RequestState.RUNNING},
} | {end: frozenset[RequestState]() for end in _ENDS}


@dataclass(slots=True, eq=False)
class Submission:
    """One prompt as its caller handed it in, with the `n` requests, one a sample, that answer it."""

    request_id: str
    arrival: int
    """Position in the order of arrival, over the life of the scheduler."""
    prompt: list[int]
    params: SamplingParams
    seed: int
    max_tokens: int
    """`params.max_tokens`, cut to what the longest sequence leaves beside the prompt."""
    eos_ids: frozenset[int]
    """Ids that end an answer as the model's own; empty under `ignore_eos`."""
    stop_ids: frozenset[int]
    terms: ServiceTerms = DEFAULT_TERMS
    arrival_time: float = 0.0
    """Seconds on the loop's clock."""
    requests: list[Request] = field(default_factory=list["Request"])
    heirs: set[Request] = field(default_factory=set["Request"])
    """Samples after the first that have yet to start; they begin on the first one's prompt pages."""
    awaits_prefix: bool = False
    """Whether the heirs stay out of the queue until the first sample has computed the prompt's pages."""
    num_scored: int = 0
    """Prompt rows whose log-probs have been asked for; they come once, with the first sample."""
    num_cached: int = 0
    """Prompt tokens that the first sample found computed when it first started."""

    @property
    def leader(self) -> Request:
        return self.requests[0]

    @property
    def num_to_score(self) -> int:
        """Prompt rows that owe a log-prob: each but the last predicts a token of the prompt."""
        return 0 if self.params.prompt_logprobs is None else len(self.prompt) - 1


@dataclass(slots=True, eq=False)
class Prefilled:
    """A text that has been computed elsewhere, on pages that are held there until they have been moved."""

    num_tokens: int = 0
    """Computed tokens; 0 where it came to nothing."""
    num_cached: int = 0
    """Of these, such as had been computed before."""
    wanted: range = range(0)
    """Indices of the pages that are to be moved, once it has a slot."""


@dataclass(slots=True, eq=False)
class Request:
    """One answer in the making: mutable host state, identified by object."""

    submission: Submission
    sample_index: int
    order: tuple[int, int]
    """(arrival, sample index): earlier is served first, the latest is preempted first."""
    table: PageTable
    state: RequestState = RequestState.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token id or the stop string that matched, or why the answer could not go on; None for an
    end-of-sequence id."""
    output: list[int] = field(default_factory=list[int])
    """Sampled tokens that have reached the host."""
    num_pending: int = 0
    """Without a slot: tokens that steps in flight will sample. With one, the slot's row counts them."""
    slot: int = -1
    """The slot while running, else -1."""
    queued: bool = False
    """Whether it is in the waiting queue."""
    num_admissions: int = 0
    num_lost: int = 0
    """Preempted: tokens that it had computed."""
    drafts: DraftTally = field(default_factory=DraftTally)
    """All zero where nothing drafts."""
    prefilled: Prefilled | None = None
    """What comes of its text where that was lent, until it has been moved."""
    held: bool = False
    """Whether it may not go on until its caller has seen its last token: see `Scheduler.resume`."""

    @property
    def num_known(self) -> int:
        """Known tokens that have reached the host."""
        return len(self.submission.prompt) + len(self.output)

    @property
    def gated(self) -> bool:
        """Whether every token must be seen before the next one can be sampled, as a grammar demands."""
        return self.submission.params.grammar is not None

    @property
    def scores_prompt(self) -> bool:
        """Whether rows of the prompt still owe their log-probs, which is the first sample's duty."""
        submission = self.submission
        return self.sample_index == 0 and submission.num_scored < submission.num_to_score

    def advance(self, state: RequestState) -> None:
        """Move to `state`. Raises RuntimeError if the transition table has no such move."""
        if state not in TRANSITIONS[self.state]:
            raise RuntimeError(
                f"request {self.submission.request_id} sample {self.sample_index} "
                f"cannot go from {self.state.value} to {state.value}"
            )
        self.state = state
        self.finish_reason = FINISH_REASONS.get(state)

    def append(self, token: int) -> RequestState | None:
        """Take a sampled token that has arrived; return the state in which it ends the answer, if it does."""
        self.output.append(token)
        return self.end()

    def end(self) -> RequestState | None:
        """The state in which the latest token ends the answer, if it does.

        Token ids that end the answer count only from `min_tokens` on; the device masks them until then.
        """
        submission, token, num_output = self.submission, self.output[-1], len(self.output)
        if num_output >= submission.params.min_tokens:
            if token in submission.eos_ids:
                return RequestState.STOPPED
            if token in submission.stop_ids:
                self.stop_reason = token
                return RequestState.STOPPED
        return RequestState.EXHAUSTED if num_output >= submission.max_tokens else None
