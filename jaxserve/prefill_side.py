"""Prompts computed on one engine for answers that another decodes: the texts of waiting requests are lent to
the first, and their pages moved to the pool of the second.

The engine that decodes can do all of it by itself, and does where this side has no room, so nothing waits
for this side alone. What is sampled here is thrown away: of a text all but the last token is computed, and
that one where the answer goes on, so that everything that chooses a token happens there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from jaxserve.plan import EngineLimits, SamplingParams, SlotLoad, StepEngine, StepHandle
from jaxserve.scheduling import (
    CacheIdentity,
    CacheScope,
    Request,
    RequestState,
    ScheduledStep,
    Scheduler,
    SchedulerPolicy,
    ServiceTerms,
)
from jaxserve.scheduling.admission import pool_obstacle
from jaxserve.scheduling.lending import is_worth_lending
from jaxserve.scheduling.request import Prefilled

Obstacle = Literal["slots", "pages", "order"]
OBSTACLES: tuple[Obstacle, ...] = ("slots", "pages", "order")
"""Why a prompt was computed where its answer is decoded: as many prompts are here as there are slots; the
pool here has no room for it; others were before it, which may not be passed."""
_NOTHING = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
_STEPS_AHEAD = 1
"""Steps that wait behind the one that runs."""


class PrefillEngine(StepEngine, Protocol):
    """An engine that can be asked whether a step is done."""

    def is_ready(self, handle: StepHandle) -> bool:
        """Whether `collect` returns at once."""
        ...


class PageLink(Protocol):
    """Moves pages from the pool of one engine to that of another."""

    def move(self, group: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Start to copy pages of a cache group, as every step dispatched so far leaves them, to pages that
        every step sees which is dispatched from now on."""
        ...


@dataclass(frozen=True, slots=True)
class PrefillStatistics:
    """Totals since the start, but for the first."""

    num_open: int = 0
    """Prompts that are there now, computed or not."""
    num_prompts: int = 0
    """That were computed there and moved."""
    num_pages: int = 0
    """That were moved, each group's counted."""
    num_local: Mapping[Obstacle, int] = field(default_factory=dict[Obstacle, int])
    """Prompts of more than a page that were computed where their answers are decoded, by the reason."""


class PrefillSide:
    """Computes texts of a scheduler's waiting requests on an engine of its own. Not safe for use from several
    threads."""

    def __init__(
        self,
        engine: PrefillEngine,
        link: PageLink,
        decoder: EngineLimits,
        *,
        cache: CacheIdentity | None = None,
    ) -> None:
        """Join an engine to one that decodes.

        Args:
            engine: computes prompts.
            link: moves pages from its pool to that of the other.
            decoder: limits of the other.
            cache: what its keys and values depend on, to reuse prefixes here too; None reuses none.

        Raises ValueError where the two engines' pages do not have the same form, or either has replicas.
        """
        own = engine.limits
        for name in ("page_size", "windows", "vocab_size"):
            if getattr(own, name) != getattr(decoder, name):
                raise ValueError(
                    f"{name} is {getattr(own, name)} where prompts are computed and {getattr(decoder, name)} "
                    "where answers are decoded"
                )
        if max(own.num_replicas, decoder.num_replicas) > 1:
            raise ValueError(f"prompts are computed apart for one replica, not {decoder.num_replicas}")
        self._engine = engine
        self._link = link
        self._page_size = own.page_size
        self._scheduler = Scheduler(own, policy=SchedulerPolicy.first_come(), cache=cache)
        self._in_flight: deque[tuple[ScheduledStep, StepHandle]] = deque()
        self._twins: dict[Request, Request] = {}
        """For each request that was lent, and whose pages are not moved yet, that which computes its text."""
        self._obstacle: Obstacle = "order"
        """Why the next one that waits was not taken, if none was."""
        self._num_taken = 0
        self._num_prompts = 0
        self._num_pages = 0
        self._num_local: dict[Obstacle, int] = dict.fromkeys(OBSTACLES, 0)

    @property
    def idle(self) -> bool:
        """Whether nothing is here and no step under way."""
        return not (self._twins or self._in_flight)

    @property
    def busy(self) -> bool:
        """Whether a step is under way."""
        return bool(self._in_flight)

    @property
    def statistics(self) -> PrefillStatistics:
        return PrefillStatistics(len(self._twins), self._num_prompts, self._num_pages, dict(self._num_local))

    def work(self, lender: Scheduler, now: float, *, wait: bool = False) -> list[Request]:
        """Give back what is computed, take more and go on with it, before `lender` plans a step.

        `wait`: for the oldest step under way. Returns the requests that were taken.
        """
        for request, twin in list(self._twins.items()):
            if request.finish_reason is not None:
                self._release(request, twin)
        while self._in_flight and (wait or self._engine.is_ready(self._in_flight[0][1])):
            self._collect(lender, now)
            wait = False
        taken = self._take(lender, now)
        while len(self._in_flight) <= _STEPS_AHEAD and (step := self._scheduler.plan(now)) is not None:
            for load in step.loads:
                self._engine.load_slot(load)
            self._in_flight.append((step, self._engine.dispatch(step.plan)))
        self._give_up_preempted(lender, now)
        return taken

    def deliver(self, request: Request, load: SlotLoad) -> None:
        """Move what is prefilled of a request to the pages of its slot, before that is loaded."""
        prefilled, request.prefilled = request.prefilled, None
        if prefilled is None or not prefilled.num_tokens:
            num_tokens = len(load.tokens) - load.num_computed
            if prefilled or is_worth_lending(request, num_tokens, self._page_size):
                self._num_local["pages" if prefilled else self._obstacle] += 1
            return
        twin = self._twins[request]
        for group, (held, wanted) in enumerate(zip(twin.table.pages, load.pages, strict=True)):
            indices = [index for index in prefilled.wanted if wanted[index]]
            assert all(held[index] for index in indices), "a page is wanted that a window has passed"
            if indices:
                sources, targets = [held[index] for index in indices], [wanted[index] for index in indices]
                self._link.move(group, sources, targets)
                self._num_pages += len(indices)
        self._num_prompts += 1
        self._release(request, twin)

    def clear(self, scope: CacheScope | None = None) -> int:
        """Let no prompt find here what is cached now, or what one tenant or namespace shares of it; return
        how many pages of text that was."""
        return 0 if self._scheduler.cache is None else self._scheduler.cache.clear(scope)

    def abandon(self) -> None:
        """A device is lost: no step in flight will ever be collected."""
        self._in_flight.clear()
        self._scheduler.abandon_steps()
        for request, twin in list(self._twins.items()):
            self._release(request, twin)

    def check_integrity(self) -> None:
        """Raise RuntimeError unless pages, slots and those that are here account for one another."""
        self._scheduler.check_integrity()
        num_here = self._scheduler.num_running + self._scheduler.num_waiting
        if num_here != len(self._twins):
            raise RuntimeError(f"{num_here} texts are computed for {len(self._twins)} requests")

    # Pieces ----------------------------------------------------------------------------------------------

    def _take(self, lender: Scheduler, now: float) -> list[Request]:
        """Take waiting requests as far as there is room."""
        taken: list[Request] = []
        self._obstacle = "order"
        while (request := lender.lend(now, self._has_room)) is not None:
            submission = request.submission
            terms = submission.terms
            twin = self._scheduler.submit(
                str(self._num_taken),
                (submission.prompt + request.output)[:-1],
                _NOTHING,
                submission.seed,
                terms=ServiceTerms(
                    tenant=terms.tenant,
                    namespace=terms.namespace,
                    cache_read=terms.cache_read,
                    cache_write=terms.cache_write,
                ),
            )
            self._num_taken += 1
            self._twins[request] = twin.leader
            taken.append(request)
        return taken

    def _has_room(self, num_tokens: int) -> bool:
        """Whether a text of so many tokens could be begun now."""
        limits, twins = self._scheduler.limits, self._twins.values()
        waiting = [twin.num_known for twin in twins if twin.state is not RequestState.RUNNING]
        if len(twins) >= limits.num_slots:
            self._obstacle = "slots"
        elif pool_obstacle(num_tokens, 1, limits) or not self._scheduler.has_room_for([*waiting, num_tokens]):
            self._obstacle = "pages"
        else:
            return True
        return False

    def _collect(self, lender: Scheduler, now: float) -> None:
        """Take the oldest step under way, and give back the requests whose texts it has completed."""
        step, handle = self._in_flight.popleft()
        result = self._engine.collect(handle)
        self._scheduler.retire(step)
        requests = {twin: request for request, twin in self._twins.items()}
        for part in step.rounds(result.tokens):
            for twin in self._scheduler.commit(part, result.tokens).requests:
                num_tokens, num_cached = len(twin.submission.prompt), twin.submission.num_cached
                request = requests[twin]
                request.prefilled = Prefilled(num_tokens, num_cached)
                lender.give_back(request, now)

    def _give_up_preempted(self, lender: Scheduler, now: float) -> None:
        """Give back, to be computed where they decode, those whose pages others have taken here."""
        for request, twin in list(self._twins.items()):
            if twin.state is RequestState.PREEMPTED:
                if request.prefilled is None:
                    lender.give_back(request, now)
                request.prefilled = Prefilled()
                self._release(request, twin)

    def _release(self, request: Request, twin: Request) -> None:
        """Let go of the pages of a text, which stay where they are as long as nobody needs them."""
        del self._twins[request]
        self._scheduler.finish(twin, RequestState.ABORTED)
