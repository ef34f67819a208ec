"""Waiting requests whose texts are computed elsewhere: who is worth that, and what they come back with."""

from __future__ import annotations

from collections.abc import Callable

from jaxserve.scheduling.prefix_caches import PrefixCaches
from jaxserve.scheduling.queue import RequestQueue
from jaxserve.scheduling.request import Request

_MAX_PASSED = 4
"""Waiting requests that are better computed where they decode, past which another is looked for."""


class Lending:
    """The requests that are away. They are out of the queue, which they go back to for a slot."""

    def __init__(self, queue: RequestQueue, cache: PrefixCaches | None, page_size: int) -> None:
        self._queue = queue
        self._cache = cache
        self._page_size = page_size
        self._away: dict[Request, None] = {}

    def __len__(self) -> int:
        return len(self._away)

    def lend(self, now: float, has_room: Callable[[int], bool]) -> Request | None:
        """Take out of the queue the next request that has more than a page to compute, if there is room where
        that is to be done. None if there is neither, or others are before it.

        Args:
            now: seconds on the loop's clock.
            has_room: whether there is room for so many tokens. Asked for the one that is next alone, so that
                nobody who needs less overtakes it.
        """
        self._queue.begin_round()
        for _ in range(_MAX_PASSED + 1):
            request = self._queue.peek(now)
            if request is None:
                return None
            num_cached = 0 if self._cache is None else self._cache.num_cached(request)
            if is_worth_lending(request, request.num_known - num_cached, self._page_size):
                if not has_room(request.num_known - 1):
                    return None
                self._queue.lend(request, num_cached)
                self._away[request] = None
                return request
            if not self._queue.set_aside(request, now):
                return None
        return None

    def give_back(self, request: Request, now: float) -> None:
        """A request that was lent waits for a slot again."""
        del self._away[request]
        self._queue.push(request, now)

    def expired(self, now: float) -> list[Request]:
        """Those that are away and whose deadline has passed, for the caller to end."""
        terms = ((request, request.submission.terms.deadline) for request in self._away)
        return [request for request, deadline in terms if deadline is not None and deadline <= now]

    def forget(self, request: Request) -> None:
        """A request has ended, wherever it is."""
        self._away.pop(request, None)


def is_worth_lending(request: Request, num_tokens: int, page_size: int) -> bool:
    """Whether the text of a waiting request, of which so many tokens are not computed, is to be computed
    elsewhere.

    Not a page or less, nor where logits of its rows are wanted, or a token of it is under way or has not been
    seen; not that of a further sample, which starts on the pages of the first; and not twice.
    """
    return (
        num_tokens > page_size
        and request.prefilled is None
        and not (request.sample_index or request.num_pending or request.held)
        and request.submission.params.prompt_logprobs is None
    )
