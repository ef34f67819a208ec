"""Replays a trace through the real scheduler and loop, over an engine that is not there, on a clock that
skips: an hour of traffic in as long as its host code takes.

Requests are handed in when their time has come, as a server's would be: between two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from jaxserve.loop import HostLoop
from jaxserve.outputs import AnswerDelta, RequestOutput
from jaxserve.plan import EngineLimits, SamplingParams
from jaxserve.planning.prompts import PromptMaker
from jaxserve.planning.records import COMPLETED, Records, Timeline
from jaxserve.planning.traces import Trace, TraceRequest
from jaxserve.planning.virtual_engine import StepTimer, VirtualClock, VirtualEngine, answer_seed
from jaxserve.scheduling.terms import ServiceTerms

MakeLoop = Callable[[VirtualEngine, VirtualClock], HostLoop]
"""The scheduler and the loop to try, over an engine and with a clock."""

_PATIENCE = 3600.0
"""Seconds of virtual time without any progress after which a simulation gives up."""
_NAP = 0.01
"""Seconds that pass while requests are held back and nothing runs."""


@dataclass(frozen=True, kw_only=True)
class SimulationOptions:
    """What is the same for every policy that is compared."""

    host_seconds: float = 300e-6
    """What the host takes for each step, in plan and commit together."""
    max_tokens: int = 2048
    """What every client asks for at most; an answer longer than that in the trace asks for its own length.
    Answers end where the trace says, which the scheduler cannot know."""
    deadline: float | None = None
    """Seconds after its arrival at which an answer is worth nothing to its client; None is never."""
    seed: int = 0
    """Of the prompts' tokens."""


@dataclass(frozen=True)
class Simulation:
    """What happened."""

    trace: Trace
    limits: EngineLimits
    records: Records
    timeline: Timeline
    end: float
    """Virtual seconds from the start to the last event."""
    busy_seconds: float
    """Of these, how many the device had a step to do."""
    num_steps: int
    num_computed_tokens: int
    """Rows computed: prompts that were not cached, answers, and whatever was computed again."""


def simulate(
    trace: Trace,
    limits: EngineLimits,
    step_seconds: StepTimer,
    make_loop: MakeLoop = lambda engine, clock: HostLoop(engine, clock=clock),
    options: SimulationOptions | None = None,
    on_end: Callable[[], object] = lambda: None,
) -> Simulation:
    """Replay a trace to its last answer.

    Args:
        trace: who comes when.
        limits: the engine's slots, pages and shapes, of `virtual_limits` for instance.
        step_seconds: how long a step takes; a cost model's method, or anything else.
        make_loop: the scheduler under trial; by default a plain `HostLoop`.
        options: what is the same for every scheduler.
        on_end: called for each request that has ended, refused ones included.

    Raises RuntimeError if the loop holds requests and does nothing for an hour of virtual time.
    """
    return _Replay(trace, limits, step_seconds, make_loop, options or SimulationOptions(), on_end).run()


class _Replay:
    def __init__(
        self,
        trace: Trace,
        limits: EngineLimits,
        step_seconds: StepTimer,
        make_loop: MakeLoop,
        options: SimulationOptions,
        on_end: Callable[[], object],
    ) -> None:
        self._trace = trace
        self._on_end = on_end
        self._options = options
        self._clock = VirtualClock()
        self._engine = VirtualEngine(limits, step_seconds, self._clock, host_seconds=options.host_seconds)
        self._loop = make_loop(self._engine, self._clock)
        self._prompts = PromptMaker(limits.vocab_size, seed=options.seed)
        self._records = Records(trace)
        self._timeline = Timeline()
        self._num_arrived = 0
        self._moved_at = 0.0

    def run(self) -> Simulation:
        while True:
            self._add_arrivals()
            if not self._loop.idle:
                self._step()
            elif self._num_arrived < len(self._trace):
                self._clock.advance_to(self._trace.requests[self._num_arrived].arrival)
            else:
                break
        self._timeline.add(self._clock.now, self._loop.snapshot())
        return Simulation(
            trace=self._trace,
            limits=self._engine.limits,
            records=self._records,
            timeline=self._timeline,
            end=self._clock.now,
            busy_seconds=self._engine.busy_seconds,
            num_steps=self._engine.num_collected,
            num_computed_tokens=self._engine.num_computed_tokens,
        )

    def _add_arrivals(self) -> None:
        requests = self._trace.requests
        while self._num_arrived < len(requests) and requests[self._num_arrived].arrival <= self._clock.now:
            self._add(self._num_arrived)
            self._num_arrived += 1

    def _add(self, number: int) -> None:
        request = self._trace.requests[number]
        params = SamplingParams(
            temperature=0.0,
            max_tokens=max(self._options.max_tokens, request.output_tokens),
            seed=answer_seed(request.output_tokens),
        )
        prompt = self._prompts.prompt(request, number)
        try:
            self._loop.add(str(number), cast(Sequence[int], prompt), params, terms=self._terms(request))
        except ValueError:
            self._records.reject(number, "too long", self._clock.now)
            self._on_end()

    def _terms(self, request: TraceRequest) -> ServiceTerms:
        patience = self._options.deadline
        deadline = None if patience is None else request.arrival + patience
        return ServiceTerms(tenant=request.tenant, priority=request.priority, deadline=deadline)

    def _step(self) -> None:
        engine, clock = self._engine, self._clock
        before = (engine.num_dispatched, engine.num_collected)
        deltas = self._loop.step()
        for delta in deltas:
            if delta.output is not None:
                self._end(delta, delta.output)
        if self._timeline.due(clock.now):
            self._timeline.add(clock.now, self._loop.snapshot())
        if deltas or before != (engine.num_dispatched, engine.num_collected):
            self._moved_at = clock.now
        else:
            self._nap()

    def _nap(self) -> None:
        """Nothing runs, and what waits is held back: time passes."""
        now, arrivals = self._clock.now, self._trace.requests[self._num_arrived :][:1]
        if now - self._moved_at > _PATIENCE:
            raise RuntimeError(
                f"the loop holds {self._loop.num_open} requests at {now:.1f} s and has done nothing "
                f"since {self._moved_at:.1f} s"
            )
        self._clock.advance_to(min([now + _NAP, *(request.arrival for request in arrivals)]))

    def _end(self, delta: AnswerDelta, output: RequestOutput) -> None:
        reason = delta.finish_reason
        outcome = COMPLETED if reason in ("stop", "length") else str(reason)
        self._records.finish(int(delta.request_id), outcome, output)
        self._on_end()
