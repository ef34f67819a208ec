"""The host loop: plan, dispatch, collect; joins the scheduler and an engine that know nothing of each other.

Plain, a step is collected before the next is planned. Overlapped, the next is planned and dispatched while
one runs: a request that turns out to have ended has then computed one row too many, which is dropped.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from jaxserve.answers import AnswerTextFactory, OpenRequest, TokenDecoder
from jaxserve.gates import GrammarGates, GrammarSource
from jaxserve.loop_stats import LoopClock, LoopSnapshot, StepCounts
from jaxserve.open_answers import OpenAnswers
from jaxserve.outputs import AnswerDelta
from jaxserve.plan import EngineLimits, SamplingParams, StepEngine, StepHandle, StepResult
from jaxserve.prefill_side import PrefillSide
from jaxserve.scheduling import (
    DEFAULT_POLICY,
    DEFAULT_TERMS,
    AdmissionGate,
    CacheIdentity,
    CacheScope,
    ClassLoad,
    KvEventLog,
    KvSnapshot,
    RequestState,
    ScheduledStep,
    Scheduler,
    SchedulerPolicy,
    ServiceTerms,
    Ticket,
)
from jaxserve.scheduling.page_swap import PageSwap
from jaxserve.speculation import Speculation
from jaxserve.step_timer import StepTimer


class LoopStoppedError(RuntimeError):
    """The loop has met an error of the engine and serves nothing any more."""


class HostLoop:
    """Serves requests on one engine. Not safe for use from several threads, `check` excepted."""

    def __init__(
        self,
        engine: StepEngine,
        *,
        overlap: bool = True,
        max_chunk: int | None = None,
        answer_text: AnswerTextFactory | None = None,
        decode_token: TokenDecoder | None = None,
        clock: Callable[[], float] = time.monotonic,
        policy: SchedulerPolicy = DEFAULT_POLICY,
        grammars: GrammarSource | None = None,
        gate: AdmissionGate | None = None,
        cache: CacheIdentity | None = None,
        swap: PageSwap | None = None,
        speculation: Speculation | None = None,
        prefills: PrefillSide | None = None,
    ) -> None:
        """Join an engine to a scheduler of its own.

        Args:
            engine: the device half.
            overlap: plan a step while the last one runs.
            max_chunk: the most prompt tokens in one step; by default what the largest shape holds.
            answer_text: makes the incremental text of a sample; None gives token ids alone.
            decode_token: the text of one token, for log-probs; None leaves it out.
            clock: seconds, for deadlines and metrics.
            policy: who goes next.
            grammars: follows the grammars of requests that have one; None refuses these.
            gate: turns requests away when there are too many; None lets all wait.
            cache: what the engine's keys and values depend on, to reuse prefixes; None reuses none.
            swap: keeps cached pages beyond the engine's pool; None keeps none.
            speculation: how answers are drafted, on an engine that verifies drafts; None drafts none.
            prefills: computes prompts for this engine elsewhere; None leaves all to it.
        """
        self._engine = engine
        self._scheduler = Scheduler(
            engine.limits,
            max_chunk=max_chunk,
            policy=policy,
            cache=cache,
            swap=swap,
            speculation=speculation,
        )
        self._swap = swap
        self._prefills = prefills
        self._gates = GrammarGates(engine, self._scheduler, grammars)
        self._depth = 1 if overlap else 0
        self.policy = policy
        self._gate = gate
        self._answer_text = answer_text
        self._decode_token = decode_token
        self._clock = clock
        self._answers = OpenAnswers(self._scheduler, self._gates, clock)
        self._in_flight: deque[tuple[ScheduledStep, StepHandle, float]] = deque()
        """With the time of each one's dispatch."""
        self._counts = StepCounts()
        self._timer = StepTimer(self._scheduler, self._counts, clock)
        self._stages = LoopClock()
        self.failure: BaseException | None = None
        """What stopped the loop."""

    @property
    def limits(self) -> EngineLimits:
        return self._scheduler.limits

    @property
    def grammars(self) -> GrammarSource | None:
        """What follows the grammars of requests. One compiled there beforehand costs its request little."""
        return self._gates.source

    @property
    def kv_events(self) -> KvEventLog | None:
        """What the prefix cache has gained and lost, a batch for each step that changed it; None without a
        cache. Its readers may be on any thread."""
        return None if self._scheduler.cache is None else self._scheduler.cache.events

    @property
    def num_running(self) -> int:
        """Samples in slots."""
        return self._scheduler.num_running

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._answers)

    @property
    def idle(self) -> bool:
        """Whether `step` has nothing to do and nothing to report."""
        if not self._answers.idle or self._in_flight:
            return False
        return all(helper is None or helper.idle for helper in (self._swap, self._prefills))

    def snapshot(self) -> LoopSnapshot:
        """How things stand now."""
        scheduler, counts = self._scheduler, self._counts
        return LoopSnapshot(
            num_open=len(self._answers),
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_free_pages=scheduler.num_free_pages,
            num_steps=counts.num_steps,
            num_sampled=counts.num_sampled,
            num_prompt_tokens=self._answers.num_prompt_tokens,
            num_preemptions=scheduler.num_preemptions,
            step_rows=tuple(counts.by_rows),
            num_step_rows=counts.num_rows,
            stage_seconds=self._stages.read(),
            prefixes=None if scheduler.cache is None else scheduler.cache.statistics,
            swaps=None if self._swap is None else self._swap.statistics,
            speculation=None if scheduler.drafting is None else scheduler.drafting.statistics,
            num_recomputed=scheduler.num_recomputed,
            num_kept_out=dict(scheduler.num_kept_out),
            decode_steps=dict(counts.decode_steps),
            prefills=None if self._prefills is None else self._prefills.statistics,
        )

    def class_loads(self) -> tuple[ClassLoad, ...]:
        """How every priority class stands; thread-safe. Empty where there is no gate to count them."""
        return () if self._gate is None else self._gate.loads()

    def clear_prefix_cache(self, scope: CacheScope | None = None) -> int:
        """Let no request find what is cached now, or what one tenant or namespace shares of it.

        Returns how many pages of text that was. Open requests keep what they stand on. Nothing is drafted any
        more from the answers that ended before, either.
        """
        cache, drafting = self._scheduler.cache, self._scheduler.drafting
        if drafting is not None:
            drafting.clear_shared(scope)
        num_pages = 0 if self._prefills is None else self._prefills.clear(scope)
        return num_pages if cache is None else num_pages + cache.clear(scope)

    def snapshot_prefixes(self) -> KvSnapshot:
        """All that the prefix cache holds, for a reader of its events who has missed some."""
        cache = self._scheduler.cache
        return KvSnapshot(0, ()) if cache is None else cache.snapshot()

    def check(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        """Raise ValueError, naming the value and the limit, for a request that could never be served."""
        if params.stop_strings and self._answer_text is None:
            raise ValueError(f"stop {params.stop_strings!r} needs text, and this loop gives token ids alone")
        self._gates.check(params)
        self._scheduler.check(prompt_token_ids, params)

    def check_admission(self, terms: ServiceTerms) -> None:
        """Raise as `admit` does where it would refuse even the smallest request; thread-safe."""
        if self._gate is not None:
            self._gate.check(terms, self._clock())

    def admit(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, terms: ServiceTerms = DEFAULT_TERMS
    ) -> Ticket | None:
        """Let a checked request in, for `add`; thread-safe. None where there is no gate.

        Raises OverloadError for one that is refused for now; ValueError if its priority is no class.
        """
        self.policy.class_index(terms)
        if self._gate is None:
            return None
        now, num_prompt = self._clock(), len(prompt_token_ids)
        max_tokens = self._scheduler.max_tokens(num_prompt, params)
        return self._gate.admit(terms, num_prompt, max_tokens, now, num_samples=params.n)

    def add(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        terms: ServiceTerms = DEFAULT_TERMS,
        ticket: Ticket | None = None,
    ) -> None:
        """Queue a request.

        Args:
            request_id: a name that no open request has.
            prompt_token_ids: the prompt.
            params: how to sample.
            prompt: its text, for the record.
            terms: when it is served, and what it may share.
            ticket: from `admit`; without one it is admitted here.

        Raises ValueError as `check` does, for a grammar that is malformed, or if the id is in use;
        OverloadError as `admit` does; LoopStoppedError if the loop has failed.
        """
        try:
            self._add(request_id, prompt_token_ids, params, prompt, terms, ticket)
        except BaseException:
            if ticket is not None:
                ticket.release(self._clock())
            raise

    def _add(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        prompt: str | None,
        terms: ServiceTerms,
        ticket: Ticket | None,
    ) -> None:
        self._check_alive()
        if request_id in self._answers:
            raise ValueError(f"request id {request_id!r} is in use by a request that has not ended")
        self.check(prompt_token_ids, params)
        matcher = self._gates.start(params)
        ticket = ticket or self.admit(prompt_token_ids, params, terms)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        now = self._clock()
        submission = self._scheduler.submit(request_id, prompt_token_ids, params, seed, terms=terms, now=now)
        self._answers.open(
            OpenRequest(submission, prompt, now, self._answer_text, self._decode_token, ticket)
        )
        if matcher is not None:
            self._gates.open(submission, matcher)

    def abort(self, request_id: str) -> bool:
        """End a request with what it has; the next `step` reports it. False if no such request is open."""
        return self._answers.cut_off(request_id, RequestState.ABORTED)

    def step(self) -> list[AnswerDelta]:
        """Move on by one step; return what was added to the open requests since the last call.

        An error of the engine ends every open request with finish reason "error", is kept as `failure`,
        and is raised; `take_deltas` then has the ends. Afterwards this raises LoopStoppedError.
        """
        self._check_alive()
        try:
            self._advance()
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            self._stages.enter("idle")
        return self.take_deltas()

    def run_until_idle(self) -> Iterator[AnswerDelta]:
        """Step until every request has ended, yielding what is added as it comes."""
        while not self.idle:
            yield from self.step()

    def take_deltas(self) -> list[AnswerDelta]:
        """What has been added and not been returned yet."""
        return self._answers.take_deltas()

    def check_integrity(self) -> None:
        """Raise RuntimeError unless pages, slots and requests account for one another.

        When nothing is open and nothing in flight, this means that every page and slot is free.
        """
        self._scheduler.check_integrity()
        if self._prefills is not None:
            self._prefills.check_integrity()
        num_left = self._scheduler.num_running + self._scheduler.num_waiting
        if num_left and not len(self._answers):
            raise RuntimeError(f"{num_left} samples belong to no open request")

    def _check_alive(self) -> None:
        if self.failure is not None:
            raise LoopStoppedError(f"the loop was stopped by {self.failure!r}") from self.failure

    def _advance(self) -> None:
        planned = self._dispatch_next()
        self._timer.learn()
        if self._swap is not None:
            self._swap.work(busy=planned or bool(self._in_flight))
        # A step whose groups are under way in a pipeline is not waited for, unless there is nothing else.
        num_due = len(self._in_flight) - self._scheduler.num_under_way - self._depth
        for _ in range(num_due if planned else max(num_due, min(len(self._in_flight), 1))):
            self._collect_next()
        if self.kv_events is not None:
            self.kv_events.flush()

    def _collect_next(self) -> None:
        step, handle, dispatched_at = self._in_flight.popleft()
        self._stages.enter("wait")
        result = self._engine.collect(handle)
        self._stages.enter("commit")
        self._timer.observe(step, dispatched_at)
        self._scheduler.retire(step)
        self._commit(step, result)
        self._timer.kept_busy = self._scheduler.num_running > 0

    def _commit(self, step: ScheduledStep, result: StepResult) -> None:
        """Take what a step brought, one round after another: each may end requests of the next."""
        self._answers.score(step, result)
        for part in step.rounds(result.tokens):
            self._stages.enter("commit")
            arrivals = self._scheduler.commit(part, result.tokens)
            self._counts.num_sampled += len(arrivals.tokens)
            if part.foreseen:
                self._counts.add_step(step.plan.num_rows)
            self._stages.enter("deliver")
            self._answers.deliver(arrivals, result)
        self._gates.work()

    def _dispatch_next(self) -> bool:
        """Plan a step and start it; return whether there was one."""
        self._stages.enter("plan")
        now = self._clock()
        for request in self._scheduler.expire(now):
            self._answers.cut_off(request.submission.request_id, RequestState.EXPIRED)
        self._answers.pass_gates()
        self._prefill(now)
        step = self._scheduler.plan(now)
        if step is None and not self._in_flight and self._wait():
            step = self._scheduler.plan(now)
        if step is None:
            return False
        if step.admitted:
            self._stages.enter("load")
            for load, request in zip(step.loads, step.admitted, strict=True):
                if self._prefills is not None:
                    self._prefills.deliver(request, load)
                self._engine.load_slot(self._gates.dress(load, request))
                self._answers.at(request).mark_scheduled(now)
        self._gates.mask_drafts(step)
        self._stages.enter("dispatch")
        self._in_flight.append((step, self._engine.dispatch(step.plan), now))
        return True

    def _wait(self) -> bool:
        """As nothing can be planned or is under way, wait for a mask or a prompt; whether one is due."""
        pending = self._gates.pending
        if pending or (self._prefills is not None and self._prefills.busy):
            self._stages.enter("wait")
            if pending:
                self._answers.pass_gates(wait=True)
            else:
                self._prefill(self._clock(), wait=True)
            self._stages.enter("plan")
            return True
        return False

    def _prefill(self, now: float, *, wait: bool = False) -> None:
        """Have prompts computed elsewhere; `wait`: for one step of that."""
        if self._prefills is not None:
            for request in self._prefills.work(self._scheduler, now, wait=wait):
                self._answers.at(request).mark_scheduled(now)

    def _fail(self, error: BaseException) -> None:
        self.failure = error
        self._gates.shut()
        self._in_flight.clear()
        self._scheduler.abandon_steps()
        if self._swap is not None:
            self._swap.offload.abandon()
        if self._prefills is not None:
            self._prefills.abandon()
        self._answers.cut_off_all(RequestState.FAILED)
