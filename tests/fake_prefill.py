"""A prefill side of engines that are computed by hand: whoever reads a moved page finds out what is on it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxserve.prefill_side import PrefillSide
from jaxserve.scheduling import CacheIdentity
from tests.fake_engine import FakeEngine


class FakePageLink:
    """Copies pages at once, and remembers which."""

    def __init__(self, source: FakeEngine, target: FakeEngine) -> None:
        self.moved: list[tuple[int, list[int], list[int]]] = []
        self._source = source
        self._target = target
        source.share_domains(target)

    def move(self, group: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        assert all(sources), "nobody is given page 0"
        self._target.write_pages(group, targets, self._source.read_pages(group, sources).take())
        self.moved.append((group, list(sources), list(targets)))


class FakePrefill:
    """A prefill side for an engine, and what it is made of."""

    def __init__(
        self,
        decoder: FakeEngine,
        *,
        num_pages: Sequence[int] | None = None,
        num_slots: int | None = None,
        cache: CacheIdentity | None = None,
        fail_at: int | None = None,
    ) -> None:
        """By default with as many pages and slots as the decoder."""
        limits = decoder.limits
        own = dataclasses.replace(
            limits,
            num_pages=tuple(num_pages or limits.num_pages),
            num_slots=num_slots or limits.num_slots,
            decode_shapes=(),
            max_iterations=1,
            max_drafts=0,
            drafts_itself=False,
            draft_reads=0,
        )
        self.engine = FakeEngine(own, fail_at=fail_at)
        self.engine.domain_of = decoder.domain_of
        self.link = FakePageLink(self.engine, decoder)
        self.side = PrefillSide(self.engine, self.link, limits, cache=cache)
