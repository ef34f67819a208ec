"""The answers under way: what each step adds to them, and how they end."""

from __future__ import annotations

from collections.abc import Callable

from jaxserve.answers import OpenRequest
from jaxserve.gates import GrammarGates
from jaxserve.outputs import AnswerDelta
from jaxserve.plan import StepResult
from jaxserve.scheduling import Arrivals, Request, RequestState, ScheduledStep, Scheduler


class OpenAnswers:
    """The open requests by id, and what has been added to them and not been taken yet."""

    def __init__(self, scheduler: Scheduler, gates: GrammarGates, clock: Callable[[], float]) -> None:
        self._scheduler = scheduler
        self._gates = gates
        self._clock = clock
        self._open: dict[str, OpenRequest] = {}
        self._deltas: list[AnswerDelta] = []
        self.num_prompt_tokens = 0
        """Of the requests that have begun to answer, in all."""

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    @property
    def idle(self) -> bool:
        """Whether nothing is open and nothing is left to be taken."""
        return not (self._open or self._deltas)

    def open(self, open_request: OpenRequest) -> None:
        """Follow a new request, whose id nobody else has."""
        self._open[open_request.submission.request_id] = open_request

    def at(self, request: Request) -> OpenRequest:
        """The open request that a sample belongs to."""
        return self._open[request.submission.request_id]

    def take_deltas(self) -> list[AnswerDelta]:
        """What has been added and not been taken yet."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def score(self, step: ScheduledStep, result: StepResult) -> None:
        """Keep what a step brought of prompts' log-probs; before its tokens are delivered."""
        for scored in step.scored:
            if scored.request.finish_reason is None:
                self.at(scored.request).take_prompt_rows(scored, result)

    def deliver(self, arrivals: Arrivals, result: StepResult) -> None:
        """Make answers of the tokens that a step brought. A request that ended while it ran gets nothing."""
        now = self._clock()
        for request, token, row, reached in zip(*arrivals, strict=True):
            open_request = self._open[request.submission.request_id]
            if open_request.begin_answer(now):
                self.num_prompt_tokens += len(request.submission.prompt)
            delta, end = open_request.take_token(request, token, reached, result, row)
            if end is not None:
                delta = self._finish(open_request, request, end, delta, now)
            elif request.gated:
                self._gates.see(request, token)
            self._deltas.append(delta)

    def pass_gates(self, *, wait: bool = False) -> None:
        """Let gated requests go on whose masks are ready, and end those that cannot."""
        for request, reason in self._gates.release(wait=wait):
            request.stop_reason = reason
            self._end(request, RequestState.STOPPED if reason is None else RequestState.FAILED)

    def cut_off(self, request_id: str, end: RequestState) -> bool:
        """End what is still open of a request, as it stands; False if there is no such request."""
        open_request = self._open.get(request_id)
        if open_request is None:
            return False
        for request in open_request.submission.requests:
            if request.finish_reason is None:
                self._end(request, end)
        return True

    def cut_off_all(self, end: RequestState) -> None:
        """End everything, as it stands."""
        for request_id in list(self._open):
            self.cut_off(request_id, end)

    def _finish(
        self, open_request: OpenRequest, request: Request, end: RequestState, delta: AnswerDelta, now: float
    ) -> AnswerDelta:
        """End a sample; return its last delta, completed."""
        self._scheduler.finish(request, end)
        self._gates.close(request)
        delta = open_request.close(request, delta, now)
        if delta.output is not None:
            del self._open[delta.request_id]
        return delta

    def _end(self, request: Request, end: RequestState) -> None:
        """End a sample without a further token."""
        open_request = self.at(request)
        delta = open_request.cut_off(request, end)
        self._deltas.append(self._finish(open_request, request, end, delta, self._clock()))
