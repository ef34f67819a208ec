"""What a tier holds: pages by key and cache group, checked when they come back."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from zlib import crc32

import numpy as np

from jaxserve.scheduling.offload_tier import Bytes, PageTier
from jaxserve.scheduling.prefix_tree_keys import CacheDomain, CacheScope


@dataclass(frozen=True, slots=True)
class PageName:
    """One page of text after all those before it."""

    key: bytes
    parent: bytes
    label: bytes
    """Its token ids, by which it is told from another page whose key should ever be the same."""
    domain: CacheDomain = field(compare=False)
    """Which the key stands for too."""


@dataclass(slots=True, eq=False)
class StoredPage:
    """A page's content in a tier."""

    name: PageName
    slot: int
    checksum: int


class TierIndex:
    """Pages of one cache group in a tier; the least recently used makes room for a new one."""

    def __init__(self, tier: PageTier) -> None:
        self.tier = tier
        self._pages: OrderedDict[bytes, StoredPage] = OrderedDict()
        self._free = list(range(tier.num_slots - 1, -1, -1))
        self.num_damaged = 0
        """Pages that did not come back as they were written."""

    def __len__(self) -> int:
        return len(self._pages)

    def find(self, name: PageName) -> StoredPage | None:
        """The page, which counts as used; None if it is not here, or another has its key."""
        page = self._pages.get(name.key)
        if page is None or page.name != name:
            return None
        self._pages.move_to_end(name.key)
        return page

    def put(self, name: PageName, data: Bytes) -> bool:
        """Write a page; whether the tier took it. One that is here already is not written again."""
        if name.key in self._pages:
            self._pages.move_to_end(name.key)
            return True
        if not self._free:
            _, oldest = self._pages.popitem(last=False)
            self._free.append(oldest.slot)
        slot = self._free.pop()
        try:
            self.tier.write(slot, data)
        except OSError:
            self._free.append(slot)
            return False
        self._pages[name.key] = StoredPage(name, slot, _checksum(name, data))
        return True

    def check(self, page: StoredPage, data: Bytes | None) -> bool:
        """Whether `data` is what was written for the page; if not, the page is forgotten."""
        if data is not None and _checksum(page.name, data) == page.checksum:
            return True
        self.num_damaged += 1
        self.forget([page])
        return False

    def forget(self, pages: Sequence[StoredPage]) -> None:
        """Give up pages, if they are still here."""
        for page in pages:
            if self._pages.get(page.name.key) is page:
                del self._pages[page.name.key]
                self._free.append(page.slot)

    def clear(self, scope: CacheScope | None = None) -> None:
        """Give up every page, or all of one scope."""
        pages = self._pages.values()
        self.forget([page for page in pages if scope is None or page.name.domain.scope == scope])


def _checksum(name: PageName, data: Bytes) -> int:
    """Of the content and of whose it is: what lies in the wrong slot is as good as damaged."""
    return crc32(np.ascontiguousarray(data).data, crc32(name.key))
