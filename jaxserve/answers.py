"""Turns the rows that steps bring back into answers: tokens, text, log-probabilities, ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from jaxserve.outputs import (
    AnswerDelta,
    CompletionOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
    TokenLogprobs,
)
from jaxserve.plan import SamplingParams, StepResult
from jaxserve.scheduling import Request, RequestState, ScoredRows, Submission, Ticket
from jaxserve.scheduling.draft_tally import DraftTally


class AnswerTextProtocol(Protocol):
    """Incremental text of one sample."""

    @property
    def stopped(self) -> str | None:
        """The stop string that has ended the text, if one has."""
        ...

    def push(self, token_id: int) -> str:
        """Take the next token; return the text that has become certain."""
        ...

    def finish(self) -> str:
        """No token follows; return the text that was held back and is part of the answer."""
        ...


AnswerTextFactory = Callable[[Sequence[int], SamplingParams], AnswerTextProtocol]
TokenDecoder = Callable[[int], str]


@dataclass(slots=True, eq=False)
class Answer:
    """One sample on its way to the caller."""

    request: Request
    text: AnswerTextProtocol | None
    pieces: list[str] = field(default_factory=list[str])
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])

    def take(self, token: int, end: RequestState | None) -> tuple[str, RequestState | None]:
        """Take the text of a token that the sample has got, and the end that this makes, if any.

        Returns the text that has become certain, and the end: a stop string's, where the text has one.
        """
        if self.text is None:
            return "", end
        piece = ""
        if end is not RequestState.STOPPED:  # A stop token is no part of the text.
            piece = self.text.push(token)
            if self.text.stopped is not None and self._may_stop:
                end = RequestState.STOPPED
                self.request.stop_reason = self.text.stopped
        if end is not None:
            piece += self.text.finish()
        self.pieces.append(piece)
        return piece, end

    @property
    def _may_stop(self) -> bool:
        return len(self.request.output) >= self.request.submission.params.min_tokens

    def cut_off(self) -> str:
        """The answer ends with what has arrived; return the text that was still held back."""
        piece = "" if self.text is None else self.text.finish()
        self.pieces.append(piece)
        return piece

    def completion(self) -> CompletionOutput:
        """The finished sample."""
        request = self.request
        assert request.finish_reason is not None, "the sample has not ended"
        logprobs = None if request.submission.params.logprobs is None else self.logprobs
        return CompletionOutput(
            index=request.sample_index,
            text="".join(self.pieces),
            token_ids=request.output,
            logprobs=logprobs,
            cumulative_logprob=None if logprobs is None else _total(logprobs, request.output),
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
        )


class OpenRequest:
    """A submitted request until its last sample has ended."""

    def __init__(
        self,
        submission: Submission,
        prompt: str | None,
        arrival_time: float,
        answer_text: AnswerTextFactory | None,
        decode_token: TokenDecoder | None,
        ticket: Ticket | None = None,
    ) -> None:
        self.submission = submission
        self._ticket = ticket
        self._prompt = prompt
        self._arrival_time = arrival_time
        self._scheduled_time: float | None = None
        self._first_token_time: float | None = None
        self._decode_token = decode_token
        self._num_open = len(submission.requests)
        self._answers = [
            Answer(request, answer_text(submission.prompt, submission.params) if answer_text else None)
            for request in submission.requests
        ]
        self._prompt_logprobs: list[TokenLogprobs | None] = [None]
        self._prompt_logprobs_sent = submission.params.prompt_logprobs is None

    def mark_scheduled(self, now: float) -> None:
        """One of its samples has been admitted."""
        if self._scheduled_time is None:
            self._scheduled_time = now
            if self._ticket is not None:
                self._ticket.start(now)

    def begin_answer(self, now: float) -> bool:
        """A token has come; return whether it is the request's first."""
        if self._first_token_time is not None:
            return False
        self._first_token_time = now
        return True

    def take_prompt_rows(self, scored: ScoredRows, result: StepResult) -> None:
        """Keep the log-probs that a step brought of a part of the prompt."""
        num_top = self.submission.params.prompt_logprobs
        assert num_top is not None, "nobody asked for prompt log-probs"
        prompt = self.submission.prompt
        for offset in range(scored.num_rows):
            token = prompt[scored.start + offset + 1]
            row = scored.first_row + offset
            self._prompt_logprobs.append(self._read_logprobs(token, result, row, num_top))

    def take_token(
        self, request: Request, token: int, end: RequestState | None, result: StepResult, row: int
    ) -> tuple[AnswerDelta, RequestState | None]:
        """What a token adds to its sample, and the state in which it ends the sample, if any."""
        answer = self._answers[request.sample_index]
        text, end = answer.take(token, end)
        logprobs: list[TokenLogprobs] | None = None
        num_top = self.submission.params.logprobs
        if num_top is not None:
            logprobs = [self._read_logprobs(token, result, row, num_top)]
            answer.logprobs += logprobs
        prompt_logprobs = None
        if not self._prompt_logprobs_sent and request.sample_index == 0:
            prompt_logprobs = self._prompt_logprobs
            self._prompt_logprobs_sent = True
        submission_id = self.submission.request_id
        delta = AnswerDelta(
            submission_id, request.sample_index, (token,), text, logprobs, None, None, prompt_logprobs
        )
        return delta, end

    def cut_off(self, request: Request, end: RequestState) -> AnswerDelta:
        """The delta of a sample that ends without a further token.

        After a failure the text is not touched any more: it may be what failed.
        """
        text = "" if end is RequestState.FAILED else self._answers[request.sample_index].cut_off()
        return AnswerDelta(self.submission.request_id, request.sample_index, (), text, None, None, None)

    def close(self, request: Request, delta: AnswerDelta, now: float) -> AnswerDelta:
        """The last delta of a sample that has ended; with the whole output, if it was the last to end."""
        self._num_open -= 1
        if not self._num_open and self._ticket is not None:
            self._ticket.release(now, sum(len(one.output) for one in self.submission.requests))
        return delta._replace(
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            output=None if self._num_open else self._output(now),
        )

    def _output(self, now: float) -> RequestOutput:
        submission = self.submission
        requests = submission.requests
        return RequestOutput(
            request_id=submission.request_id,
            prompt=self._prompt,
            prompt_token_ids=submission.prompt,
            prompt_logprobs=None if submission.params.prompt_logprobs is None else self._prompt_logprobs,
            outputs=[answer.completion() for answer in self._answers],
            seed=submission.seed,
            metrics=RequestMetrics(
                arrival_time=self._arrival_time,
                scheduled_time=self._scheduled_time,
                first_token_time=self._first_token_time,
                finish_time=now,
                num_preemptions=sum(max(0, request.num_admissions - 1) for request in requests),
            ),
            num_cached_tokens=submission.num_cached,
            drafts=DraftTally.total(request.drafts for request in requests),
        )

    def _read_logprobs(self, token: int, result: StepResult, row: int, num_top: int) -> TokenLogprobs:
        decode = self._decode_token
        entries = {
            token: Logprob(
                float(result.logprobs[row]), int(result.ranks[row]), decode(token) if decode else None
            )
        }
        top_tokens = result.top_tokens[row, :num_top].tolist()
        top_logprobs = result.top_logprobs[row, :num_top].tolist()
        for rank, (top, logprob) in enumerate(zip(top_tokens, top_logprobs, strict=True), start=1):
            if top != token:
                entries[top] = Logprob(logprob, rank, decode(top) if decode else None)
        return entries


def _total(logprobs: Sequence[TokenLogprobs], tokens: Sequence[int]) -> float:
    return sum(at[token].logprob for at, token in zip(logprobs, tokens, strict=True))
