"""Replays a trace through the real scheduler and loop, over an engine that is not there, on a clock that
skips: an hour of traffic in as long as its host code takes.

Requests are handed in when their time has come, as a server's would be: between two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

from jaxserve.loop import HostLoop
from jaxserve.outputs import AnswerDelta, RequestOutput
from jaxserve.plan import EngineLimits, SamplingParams
from jaxserve.planning.arrivals import Arrival, Arrivals
from jaxserve.planning.prompts import PromptMaker
from jaxserve.planning.records import COMPLETED, Records, Timeline
from jaxserve.planning.traces import Trace, TraceRequest
from jaxserve.planning.virtual_engine import StepTimer, VirtualClock, VirtualEngine, answer_seed
from jaxserve.scheduling.overload import OverloadError
from jaxserve.scheduling.terms import ServiceTerms

_PATIENCE = 3600.0
"""Seconds of virtual time without any progress after which a simulation gives up."""
_VOCABULARY = 257
"""Token ids in prompts: of each of these Python has one object, so that a prompt that waits is eight bytes a
token and not thirty-six."""
_NAP = 0.01
"""Seconds that pass while requests are held back and nothing runs."""


@dataclass(frozen=True)
class Contender:
    """What is under trial."""

    make_loop: Callable[[VirtualEngine, VirtualClock], HostLoop] = field(
        default=lambda engine, clock: HostLoop(engine, clock=clock)
    )
    """The scheduler and the loop, over an engine and with a clock, behind a door or none."""


@dataclass(frozen=True, kw_only=True)
class SimulationOptions:
    """What is the same for every contender."""

    host_seconds: float = 300e-6
    """What the host takes for each step, in plan and commit together."""
    max_tokens: int = 2048
    """What every client asks for at most; an answer longer than that in the trace asks for its own length.
    Answers end where the trace says, which the scheduler cannot know."""
    deadline: float | None = None
    """Seconds after its arrival at which an answer is worth nothing to its client; None is never."""
    retries: int = 0
    """Times that a client that is turned away tries again, after the delay that it was told."""
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
    saved_seconds: float = 0.0
    """What the device did not have to compute, as the loop reckons from the steps that it has timed."""


def simulate(
    trace: Trace,
    limits: EngineLimits,
    step_seconds: StepTimer,
    contender: Contender | None = None,
    options: SimulationOptions | None = None,
    on_end: Callable[[], object] = lambda: None,
) -> Simulation:
    """Replay a trace to its last answer.

    Args:
        trace: who comes when.
        limits: the engine's slots, pages and shapes, of `virtual_limits` for instance.
        step_seconds: how long a step takes; a cost model's method, or anything else.
        contender: what is under trial; by default a plain `HostLoop` without a door.
        options: what is the same for every contender.
        on_end: called for each request that has ended, refused ones included.

    Raises RuntimeError if the loop holds requests and does nothing for an hour of virtual time.
    """
    replay = _Replay(trace, limits, step_seconds, contender or Contender(), options or SimulationOptions())
    return replay.run(on_end)


class _Replay:
    def __init__(
        self,
        trace: Trace,
        limits: EngineLimits,
        step_seconds: StepTimer,
        contender: Contender,
        options: SimulationOptions,
    ) -> None:
        self._trace = trace
        self._options = options
        self._clock = VirtualClock()
        self._engine = VirtualEngine(limits, step_seconds, self._clock, host_seconds=options.host_seconds)
        self._loop = contender.make_loop(self._engine, self._clock)
        self._prompts = PromptMaker(min(limits.vocab_size, _VOCABULARY), seed=options.seed)
        self._records = Records(trace)
        self._timeline = Timeline()
        self._arrivals = Arrivals(trace)
        self._moved_at = 0.0
        self._on_end: Callable[[], object] = lambda: None

    def run(self, on_end: Callable[[], object]) -> Simulation:
        self._on_end = on_end
        while True:
            for arrival, request in self._arrivals.due(self._clock.now):
                self._add(arrival, request)
            if not self._loop.idle:
                self._step()
            elif self._arrivals.next_time < float("inf"):
                self._clock.advance_to(self._arrivals.next_time)
            else:
                break
        snapshot = self._loop.snapshot()
        self._timeline.add(self._clock.now, snapshot)
        return Simulation(
            trace=self._trace,
            limits=self._engine.limits,
            records=self._records,
            timeline=self._timeline,
            end=self._clock.now,
            busy_seconds=self._engine.busy_seconds,
            num_steps=self._engine.num_collected,
            num_computed_tokens=self._engine.num_computed_tokens,
            saved_seconds=snapshot.prefixes.saved_milliseconds / 1000 if snapshot.prefixes else 0.0,
        )

    def _add(self, arrival: Arrival, request: TraceRequest) -> None:
        """Let a client in, or note why not."""
        options = self._options
        max_tokens = max(options.max_tokens, request.output_tokens)
        terms = ServiceTerms(
            tenant=request.tenant,
            priority=request.priority,
            deadline=None if options.deadline is None else request.arrival + options.deadline,
            is_retry=arrival.num_tries > 0,
        )
        params = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, seed=answer_seed(request.output_tokens)
        )
        # An array is a sequence of ints in all but name, at a tenth of the memory.
        prompt = cast(Sequence[int], self._prompts.prompt(request, arrival.number))
        try:
            self._loop.add(str(arrival.number), prompt, params, terms=terms)
        except OverloadError as refusal:
            self._turn_away(arrival, refusal)
        except ValueError:
            self._refuse(arrival, "too long")

    def _turn_away(self, arrival: Arrival, refusal: OverloadError) -> None:
        """The client comes back when it was told to, if it has the patience."""
        if arrival.num_tries < self._options.retries:
            self._records.num_retries[arrival.number] += 1
            self._arrivals.come_back(arrival, self._clock.now + refusal.retry_after)
        else:
            self._refuse(arrival, refusal.reason)

    def _refuse(self, arrival: Arrival, reason: str) -> None:
        self._records.reject(arrival.number, reason, self._clock.now)
        self._on_end()

    def _step(self) -> None:
        engine, clock = self._engine, self._clock
        before = (engine.num_dispatched, engine.num_collected)
        deltas = self._loop.step()
        for delta in deltas:
            if delta.output is not None:
                self._finish(delta, delta.output)
        if self._timeline.due(clock.now):
            self._timeline.add(clock.now, self._loop.snapshot())
        if deltas or before != (engine.num_dispatched, engine.num_collected):
            self._moved_at = clock.now
        else:
            self._nap()

    def _nap(self) -> None:
        """Nothing runs, and what waits is held back: time passes."""
        now = self._clock.now
        if now - self._moved_at > _PATIENCE:
            raise RuntimeError(
                f"the loop holds {self._loop.num_open} requests at {now:.1f} s and has done nothing "
                f"since {self._moved_at:.1f} s"
            )
        self._clock.advance_to(min(now + _NAP, self._arrivals.next_time))

    def _finish(self, delta: AnswerDelta, output: RequestOutput) -> None:
        reason = delta.finish_reason
        outcome = COMPLETED if reason in ("stop", "length") else str(reason)
        self._records.finish(int(delta.request_id), outcome, output)
        self._on_end()
