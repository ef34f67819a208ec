"""Pages that leave the pool and come back: in time, whole, or not at all."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

from jaxserve.scheduling import PagePool, PageTable
from jaxserve.scheduling.offload import Offload
from jaxserve.scheduling.offload_cost import Rate, TransferRates, choose
from jaxserve.scheduling.offload_tier import Bytes, HostMemoryTier, TierRead
from jaxserve.scheduling.prefix_tree import PrefixTree, TreeCursor
from jaxserve.scheduling.prefix_tree_keys import CacheDomain, CacheScope
from jaxserve.scheduling.prefix_tree_match import PrefixQuery

PAGE = 4
BYTES = 8
DOMAIN = CacheDomain("model", "bf16", CacheScope("tenant", "a"))
OTHER = dataclasses.replace(DOMAIN, scope=CacheScope("tenant", "b"))


class FakeDevice:
    """Pages of bytes; copies to the host take until `arrive`."""

    def __init__(self, num_pages: Sequence[int]) -> None:
        self.memory = [np.zeros((pages, BYTES), np.uint8) for pages in num_pages]
        self.started: list[FakeRead] = []

    def read_pages(self, group: int, pages: Sequence[int]) -> FakeRead:
        self.started.append(FakeRead(self.memory[group][list(pages)]))
        return self.started[-1]

    def write_pages(self, group: int, pages: Sequence[int], data: Bytes) -> None:
        self.memory[group][list(pages)] = data

    def arrive(self) -> None:
        for read in self.started:
            read.ready = True


class FakeRead:
    def __init__(self, data: Bytes) -> None:
        self.data = data
        self.ready = False

    def take(self) -> Bytes:
        return self.data


class FaultyTier(HostMemoryTier):
    """Loses, confuses or spoils what it is told to."""

    spoiled: frozenset[int] = frozenset()
    lost: frozenset[int] = frozenset()
    swapped: tuple[int, int] | None = None
    down = False
    full = False

    def write(self, slot: int, data: Bytes) -> None:
        if self.full:
            raise OSError("no space left")
        super().write(slot, data)

    def read(self, slots: Sequence[int]) -> TierRead:
        if self.down:
            raise OSError("connection refused")
        if self.swapped is not None:
            one, other = self.swapped
            there = {one: other, other: one}
            slots = [there.get(slot, slot) for slot in slots]
        read = super().read(slots)
        contents = read.take()
        for number, slot in enumerate(slots):
            data = contents[number]
            assert data is not None
            if slot in self.spoiled:
                data[3] ^= 1
            if slot in self.lost:
                contents[number] = None
        return read


class Engine:
    def __init__(self, windows: tuple[int, ...] = (0,), num_slots: int = 50) -> None:
        num_pages = (60,) * len(windows)
        self.windows = windows
        self.pool = PagePool(num_pages)
        self.device = FakeDevice(num_pages)
        self.tiers = [FaultyTier(num_slots, BYTES) for _ in windows]
        self.offload = Offload(self.tiers, self.device, PAGE, windows)
        self.tree = PrefixTree(self.pool, PAGE, windows, on_page=self.offload.note_stored)
        self.running: list[PageTable] = []

    def start(self, tokens: list[int], domain: CacheDomain = DOMAIN) -> tuple[PageTable, TreeCursor]:
        """A request that computes all of `tokens` without reading the cache."""
        table, cursor = PageTable(self.pool, PAGE, self.windows), self.tree.open(domain)
        for end in range(PAGE, len(tokens) + 1, PAGE):
            table.pass_window(end - PAGE)
            table.grow(end)
            for group, pages in enumerate(table.pages):
                self.device.memory[group][pages[-1]] = content(domain, tokens[:end], group)
            self.tree.insert(cursor, tokens[end - PAGE : end], table.pages)
        self.running.append(table)
        return table, cursor

    def end(self, request: tuple[PageTable, TreeCursor]) -> None:
        table, cursor = request
        self.running.remove(table)
        table.clear()
        self.tree.close(cursor)

    def forget(self) -> None:
        """Everything idle leaves the pool, and something else is written over it."""
        self.tree.evict(self.pool.num_pages)
        for memory in self.device.memory:
            memory[:] = 255

    def offload_all(self) -> None:
        self.offload.write_early(1000)
        self.device.arrive()
        self.offload.collect()

    def resume(self, tokens: list[int], domain: CacheDomain = DOMAIN) -> int:
        """Tokens that a request finds computed, after checking every page that it would read."""
        found = self.tree.match(PrefixQuery(domain, tokens, len(tokens)))
        more = self.offload.match(found)
        cursor = self.tree.use(found)
        table = PageTable(self.pool, PAGE, self.windows)
        self.running.append(table)
        table.adopt(found.prefix(PAGE, self.windows))
        restoration = self.offload.begin(more)
        assert restoration.ready

        def grow(num_pages: int) -> list[list[int]]:
            table.take_computed((more.first_page + num_pages) * PAGE)
            return table.pages

        num_tokens = (found.num_full + self.offload.restore(restoration, grow)) * PAGE
        self.tree.insert(cursor, tokens[found.num_full * PAGE : num_tokens], table.pages)
        for group, window in enumerate(self.windows):
            first = max(0, num_tokens - window + 1) // PAGE if window else 0
            for index in range(first, num_tokens // PAGE):
                expected = content(domain, tokens[: (index + 1) * PAGE], group)
                assert (self.device.memory[group][table.pages[group][index]] == expected).all()
        self.end((table, cursor))
        self.pool.check_integrity([*self.tree.holders(), *(table.pages for table in self.running)])
        return num_tokens


def content(domain: CacheDomain, tokens: list[int], group: int) -> Bytes:
    """What the device computes for the last page of a text: something that depends on all of it."""
    seed = hash((domain.scope.name == "a", tuple(tokens), group)) % 2**32
    return np.random.default_rng(seed).integers(0, 255, BYTES, np.uint8)


TEXT = list(range(100, 124))


@pytest.mark.parametrize("windows", [(0,), (0, 6), (7,), (0, 3, 9)])
def test_an_evicted_text_comes_back_as_it_was(windows: tuple[int, ...]) -> None:
    engine = Engine(windows)
    engine.end(engine.start(TEXT))
    engine.offload_all()
    engine.forget()
    assert engine.resume(TEXT) == 24
    engine.forget()
    assert engine.resume([*TEXT[:12], 1, 2, 3, 4]) == 12
    assert engine.resume([1, *TEXT]) == 0
    assert engine.resume(TEXT, OTHER) == 0


@pytest.mark.parametrize("windows", [(0,), (0, 6)])
def test_what_the_tree_still_has_is_not_read_again(windows: tuple[int, ...]) -> None:
    engine = Engine(windows)
    first = engine.start(TEXT[:12])
    engine.end(engine.start(TEXT))
    engine.offload_all()
    engine.tree.evict([3] + [0] * (len(windows) - 1))
    found = engine.tree.match(PrefixQuery(DOMAIN, TEXT, 24))
    more = engine.offload.match(found)
    assert (found.num_full, more.first_page, more.num_pages) == (3, 3, 3)
    assert more.num_bytes == (3 + 2 * (len(windows) - 1)) * BYTES
    assert engine.resume(TEXT) == 24
    engine.end(first)


def test_pages_are_written_early_once_and_the_oldest_first() -> None:
    engine = Engine()
    engine.end(engine.start(TEXT))
    assert engine.offload.write_early(4) == 4
    assert (engine.offload.num_unwritten, engine.offload.num_writing) == (2, 4)
    engine.offload.collect()
    assert engine.offload.num_writing == 4, "they have not arrived"
    engine.device.arrive()
    engine.offload.collect()
    engine.forget()
    assert engine.resume(TEXT) == 16
    engine.offload_all()
    assert engine.offload.write_early(10) == 0


def test_a_request_is_saved_before_it_gives_up_its_pages() -> None:
    engine = Engine()
    request = engine.start(TEXT)
    assert engine.offload.bytes_to_save(request[1]) == 6 * BYTES
    assert engine.offload.save(request[1]) == 6
    engine.end(request)
    engine.forget()
    engine.offload.collect(wait=True)
    assert engine.resume(TEXT) == 24
    again = engine.start(TEXT)
    assert engine.offload.bytes_to_save(again[1]) == engine.offload.save(again[1]) == 0
    engine.end(again)


@pytest.mark.parametrize("windows", [(0,), (0, 6)])
@pytest.mark.parametrize("fault", [{"spoiled": {3}}, {"lost": {3}}, {"swapped": (3, 4)}])
def test_a_damaged_page_is_a_miss(windows: tuple[int, ...], fault: dict[str, object]) -> None:
    engine = Engine(windows)
    engine.end(engine.start(TEXT))
    engine.offload_all()
    engine.forget()
    for name, value in fault.items():
        setattr(engine.tiers[0], name, value)
    num_tokens = engine.resume(TEXT)
    assert num_tokens == (0 if len(windows) > 1 else 12)
    assert engine.offload.indices[0].num_damaged > 0
    engine.forget()
    assert engine.resume(TEXT) == 12, "the damaged page is forgotten, what came before it is good"


def test_a_tier_that_cannot_be_reached_is_a_miss() -> None:
    engine = Engine()
    engine.end(engine.start(TEXT))
    engine.offload_all()
    engine.forget()
    engine.tiers[0].down = True
    assert engine.resume(TEXT) == 0


def test_what_a_tier_does_not_take_is_not_found() -> None:
    engine = Engine()
    engine.tiers[0].full = True
    engine.end(engine.start(TEXT))
    engine.offload_all()
    engine.forget()
    assert engine.resume(TEXT) == 0
    engine.tiers[0].full = False
    engine.end(engine.start(TEXT))
    engine.offload_all()
    engine.forget()
    assert engine.resume(TEXT) == 24


def test_the_least_recently_used_makes_room() -> None:
    engine = Engine(num_slots=6)
    for text in (TEXT[:12], [7] * 12):
        engine.end(engine.start(text))
        engine.offload_all()
    engine.forget()
    assert engine.resume(TEXT[:12]) == 12
    engine.end(engine.start([8] * 12))
    engine.offload_all()
    engine.forget()
    assert engine.resume([7] * 12) == 0
    assert engine.resume(TEXT[:12]) == 12


@pytest.mark.parametrize("scope", [None, DOMAIN.scope])
def test_clearing_forgets_also_what_is_under_way(scope: CacheScope | None) -> None:
    engine = Engine()
    engine.end(engine.start(TEXT, OTHER))
    engine.offload_all()
    engine.end(engine.start(TEXT))
    engine.offload.write_early(3)
    engine.tree.clear(scope)
    engine.offload.clear(scope)
    engine.offload_all()
    engine.forget()
    assert engine.resume(TEXT) == 0
    assert engine.resume(TEXT, OTHER) == (0 if scope is None else 24)


def test_what_is_quicker_is_chosen() -> None:
    rates = TransferRates(out=Rate(1e9), back=Rate(4e9, latency=1e-3))
    assert choose(rates, recompute_seconds=0.1, bytes_out=10**7, bytes_back=10**7) == "swap"
    assert choose(rates, recompute_seconds=0.1, bytes_out=10**8, bytes_back=10**8) == "recompute"
    assert choose(rates, recompute_seconds=0.1, bytes_out=0, bytes_back=10**8) == "swap"
    assert choose(rates, recompute_seconds=5e-4, bytes_out=0, bytes_back=1) == "recompute"
    for _ in range(60):
        rates.back.observe(10**7, 0.101)
    assert rates.back.bytes_per_second == pytest.approx(1e8, rel=0.01)
    assert choose(rates, recompute_seconds=0.1, bytes_out=0, bytes_back=10**8) == "recompute"


def test_bad_sizes_are_named() -> None:
    with pytest.raises(ValueError, match="num_slots 0"):
        HostMemoryTier(0, 8)
    with pytest.raises(ValueError, match=r"memory is float32\[2, 8\]; expected uint8\[2, 8\]"):
        HostMemoryTier(2, 8, np.zeros((2, 8), np.float32))
    with pytest.raises(ValueError, match="2 tiers for 1 cache groups"):
        Offload([HostMemoryTier(2, 8)] * 2, FakeDevice([3]), PAGE, (0,))
    with pytest.raises(ValueError, match="bytes_per_second 0"):
        Rate(0)
    with pytest.raises(ValueError, match="latency -1"):
        Rate(1, latency=-1)
