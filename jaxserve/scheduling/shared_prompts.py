"""Prompts that several samples share: the first computes them, the others start on its pages."""

from __future__ import annotations

from jaxserve.plan import EngineLimits
from jaxserve.scheduling.pages import PagePool, SharedPrefix
from jaxserve.scheduling.prefix_cache import PrefixCache
from jaxserve.scheduling.request import Request, Submission


class SharedPrompts:
    """Holds computed prompts for samples that have yet to start.

    A prompt is shared short of its last token, which every sample computes for its own logits; where pages
    cannot be copied, as far as its full pages go.
    """

    def __init__(self, pool: PagePool, limits: EngineLimits, cache: PrefixCache | None) -> None:
        self._pool = pool
        self._cache = cache
        self._unit = 1 if limits.copies_pages else limits.page_size
        self._prefixes: dict[Submission, SharedPrefix] = {}

    def __len__(self) -> int:
        return len(self._prefixes)

    def find(self, request: Request) -> SharedPrefix | None:
        """What the request can start on."""
        return self._prefixes.get(request.submission) if request.sample_index else None

    def num_shareable(self, prompt_len: int) -> int:
        """How much of a prompt is shared, in tokens."""
        return (prompt_len - 1) // self._unit * self._unit

    def offer(self, request: Request, num_computed: int) -> bool:
        """Hold the prompt of a first sample once its planned steps have computed it.

        Returns whether the others may start now: from the next step on, as within one step nobody reads
        what another writes.
        """
        submission = request.submission
        num_tokens = self.num_shareable(len(submission.prompt))
        if request.sample_index or not submission.awaits_prefix or num_computed < num_tokens:
            return False
        submission.awaits_prefix = False
        self._prefixes[submission] = request.table.share(num_tokens)
        if self._cache is not None:
            self._cache.share(request)
        return True

    def drop_heir(self, request: Request) -> None:
        """A sample has started, or will never: the last one's prompt is let go."""
        heirs = request.submission.heirs
        heirs.discard(request)
        if not heirs and request.submission in self._prefixes:
            self.release(request.submission)

    def release_latest(self) -> bool:
        """Let go the latest prompt that no running request holds; the waiting samples compute it themselves.

        Returns whether there was one.
        """
        most = 1 if self._cache is None else 2  # The cache holds what it has stored as well.
        for submission in reversed(self._prefixes):
            held = self._prefixes[submission].held
            if any(self._pool.num_references(group, page) <= most for group, page in held):
                self.release(submission)
                return True
        return False

    def release_any(self, last: Submission) -> None:
        """Let one prompt go, that of `last` only if there is no other."""
        self.release(min(self._prefixes, key=lambda owner: owner is last))

    def release(self, submission: Submission) -> None:
        for group, page in self._prefixes.pop(submission).held:
            self._pool.release(group, page)
        if self._cache is not None:
            self._cache.end_shared(submission)

    def holders(self) -> list[list[list[int]]]:
        """The pages held, for each prompt and group, as `PagePool.check_integrity` takes them."""
        return [
            [[page for g, page in prefix.held if g == group] for group in range(len(prefix.pages))]
            for prefix in self._prefixes.values()
        ]
