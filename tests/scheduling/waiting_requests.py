"""Requests for tests of what happens around the slots, where nobody computes anything."""

from __future__ import annotations

import itertools

from jaxserve.plan import SamplingParams
from jaxserve.scheduling.pages import PagePool, PageTable
from jaxserve.scheduling.queue import RequestQueue
from jaxserve.scheduling.request import Request, RequestState, Submission
from jaxserve.scheduling.terms import ServiceTerms

_NUMBERS = itertools.count()
_POOL = PagePool((2,))


def make_request(
    tenant: str = "",
    priority: str = "default",
    *,
    arrival: float = 0.0,
    deadline: float | None = None,
    prompt_len: int = 10,
    max_tokens: int = 16,
    is_retry: bool = False,
) -> Request:
    """A request that arrives after all that were made before it."""
    number = next(_NUMBERS)
    submission = Submission(
        request_id=str(number),
        arrival=number,
        prompt=[7] * prompt_len,
        params=SamplingParams(max_tokens=max_tokens),
        seed=0,
        max_tokens=max_tokens,
        eos_ids=frozenset(),
        stop_ids=frozenset(),
        terms=ServiceTerms(tenant=tenant, priority=priority, deadline=deadline, is_retry=is_retry),
        arrival_time=arrival,
    )
    request = Request(submission, 0, (number, 0), PageTable(_POOL, 4, (0,)))
    submission.requests.append(request)
    return request


def start_next(queue: RequestQueue, now: float = 0.0) -> Request | None:
    """Give a slot to whoever is next."""
    request = queue.peek(now)
    if request is not None:
        queue.start(request)
        request.num_admissions += 1
        request.advance(RequestState.RUNNING)
    return request


def preempt(queue: RequestQueue, request: Request, now: float = 0.0) -> None:
    """Take a request's slot away and let it wait again."""
    request.advance(RequestState.PREEMPTED)
    queue.leave(request)
    queue.push(request, now)
