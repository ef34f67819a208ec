"""How much prefill does the prefix cache save, beside a plain LRU cache of the same size?

    python -m benchmarks.prefix_cache TRACE.jsonl

Replays a trace with prefix hashes, one request after another: each matches what it can, stores the rest, and
ends. Where a pool is full, the tree gives up pages in its own order, the plain cache the least recently used
leaf. A page is one hash of the trace, 512 tokens; only full pages are stored, and the last token of a prompt
is always computed. Also: what the tree costs the host.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from itertools import pairwise

from jaxserve.planning.trace_files import read_trace
from jaxserve.planning.traces import BLOCK_TOKENS, Trace
from jaxserve.scheduling.pages import PagePool
from jaxserve.scheduling.prefix_tree import PrefixTree
from jaxserve.scheduling.prefix_tree_keys import CacheDomain, CacheScope
from jaxserve.scheduling.prefix_tree_match import PrefixQuery

POOL_SIZES = (500, 700, 1_000, 2_000, 3_500, 5_000, 7_000, 10_000, 14_000, 20_000, 30_000, 50_000, 100_000)
PAIR_SHARES = (0.0, 0.017, 0.05, 0.1)
"""Cost of attending to 512 tokens beside that of everything else, for one token; 0.017 is a model of 8B."""
TOKEN_MILLISECONDS = 0.05
DOMAIN = CacheDomain("model", "bf16", CacheScope("tenant", ""))

Prompts = Sequence[Sequence[int]]
Cost = Callable[[int, int], float]


def prompts_of(trace: Trace) -> list[list[int]]:
    """Each request's full pages short of its last token, a hash each.

    Raises ValueError if no request of the trace has prefix hashes.
    """
    prompts = [list(r.prefix_hashes[: (r.prompt_tokens - 1) // BLOCK_TOKENS]) for r in trace.requests]
    if not any(prompts):
        raise ValueError(f"trace {trace.name} has no prefix hashes: nothing in it can be shared")
    return prompts


def page_cost(pair_share: float) -> Cost:
    """(first page, number of pages) -> milliseconds to compute them: linear and quadratic in the length."""

    def cost(start: int, num_pages: int) -> float:
        attended = num_pages * (start + num_pages / 2)
        return TOKEN_MILLISECONDS * BLOCK_TOKENS * (num_pages + pair_share * attended)

    return cost


def ideal_hits(prompts: Prompts) -> int:
    """The pages that were seen before in the same place, counted from the hashes alone."""
    seen: set[int] = set()
    num_hits = 0
    for prompt in prompts:
        num_hits += next((n for n, known in enumerate(prompt) if known not in seen), len(prompt))
        seen.update(prompt)
    return num_hits


def replay_tree(prompts: Prompts, num_pages: int, cost: Cost) -> PrefixTree:
    """The prompts through the tree over a pool of so many pages; its statistics say what was saved."""
    pool = PagePool([num_pages + 1])
    tree = PrefixTree(pool, 1, (0,), recompute_cost=cost)
    for prompt in prompts:
        match = tree.match(PrefixQuery(DOMAIN, prompt, len(prompt)))
        num_full = match.num_full
        cursor = tree.use(match)
        missing = len(prompt) - num_full - pool.num_free(0)
        if missing > 0:
            tree.evict([missing])
        num_new = min(len(prompt) - num_full, pool.num_free(0))
        own = [0] * num_full + [pool.acquire(0) for _ in range(num_new)]
        tree.insert(cursor, prompt[num_full : num_full + num_new], [own])
        for page in own[num_full:]:
            pool.release(0, page)
        tree.close(cursor)
    return tree


class _Leaf:
    __slots__ = ("children", "depth", "known", "last_used", "parent")

    def __init__(self, known: int, parent: _Leaf | None) -> None:
        self.known, self.parent = known, parent
        self.depth = 0 if parent is None else parent.depth + 1
        self.children: dict[int, _Leaf] = {}
        self.last_used = 0


def replay_lru(prompts: Prompts, num_pages: int, cost: Cost) -> float:
    """Milliseconds saved by a cache that gives up the leaf used least recently."""
    root, saved, num_held = _Leaf(-1, None), 0.0, 0
    heap: list[tuple[int, int, _Leaf]] = []
    for now, prompt in enumerate(prompts, start=1):
        path = [root]
        for known in prompt:
            child = path[-1].children.get(known)
            if child is None:
                break
            path.append(child)
        saved += cost(0, len(path) - 1)
        for node in path:
            node.last_used = now
        for known in prompt[len(path) - 1 :]:
            if num_held == num_pages:
                if not _evict_oldest(heap, now):
                    break
                num_held -= 1
            child = path[-1].children[known] = _Leaf(known, path[-1])
            child.last_used = now
            path.append(child)
            num_held += 1
        heappush(heap, (now, len(path), path[-1]))
    return saved


def _evict_oldest(heap: list[tuple[int, int, _Leaf]], now: int) -> bool:
    while heap:
        last_used, _, node = heappop(heap)
        parent = node.parent
        if parent is None or node.children or node.last_used != last_used or last_used == now:
            continue  # Used again, and in the heap again, or grown since.
        del parent.children[node.known]
        node.parent = None
        heappush(heap, (parent.last_used, parent.depth, parent))
        return True
    return False


def compare(prompts: Prompts, pool_sizes: Iterable[int], pair_share: float) -> list[tuple[int, float, float]]:
    """(pool size, milliseconds saved by the tree, by plain LRU) for each size."""
    cost = page_cost(pair_share)
    rows: list[tuple[int, float, float]] = []
    for size in pool_sizes:
        ours = replay_tree(prompts, size, cost).statistics.saved_milliseconds
        rows.append((size, ours, replay_lru(prompts, size, cost)))
    return rows


def host_microseconds(page_size: int, num_requests: int = 200, num_pages: int = 200) -> tuple[float, ...]:
    """Microseconds of processor time for a page: inserting one at a time, matching, closing, evicting."""
    pool = PagePool([num_requests * num_pages + 1])
    tree = PrefixTree(pool, page_size, (0,), recompute_cost=page_cost(0.017))
    texts = [range(n * 1000, n * 1000 + num_pages * page_size) for n in range(num_requests)]
    tables = [[[pool.acquire(0) for _ in range(num_pages)]] for _ in texts]
    cursors = [tree.open(DOMAIN) for _ in texts]
    tokens = [[list(text[i : i + page_size]) for text in texts] for i in range(0, len(texts[0]), page_size)]
    times = [time.process_time()]
    for column in tokens:
        for cursor, page, table in zip(cursors, column, tables, strict=True):
            tree.insert(cursor, page, table)
    times.append(time.process_time())
    for text in texts:
        tree.match(PrefixQuery(DOMAIN, text, len(text)))
    times.append(time.process_time())
    for (table,) in tables:
        for page in table:
            pool.release(0, page)
    released = time.process_time()
    for cursor in cursors:
        tree.close(cursor)
    times.append(times[-1] + time.process_time() - released)
    evicting = time.process_time()
    tree.evict([num_requests * num_pages])
    times.append(times[-1] + time.process_time() - evicting)
    each = 1e6 / (num_requests * num_pages)
    return tuple((end - start) * each for start, end in pairwise(times))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("trace", help="a file that jaxserve.planning.trace_files.read_trace reads")
    parser.add_argument("--pools", type=int, nargs="+", default=POOL_SIZES, help="pool sizes in pages")
    parser.add_argument("--pair-shares", type=float, nargs="+", default=PAIR_SHARES)
    args = parser.parse_args()
    prompts = prompts_of(read_trace(args.trace))
    total, ideal = sum(map(len, prompts)), ideal_hits(prompts)
    hits = replay_tree(prompts, total, page_cost(0.0)).statistics.hit_tokens
    print(f"{len(prompts)} prompts, {total} pages; unbounded: {hits} hits, the ideal is {ideal}")
    print("prefill seconds saved by the tree / by plain LRU, for each cost of attention")
    print(f"{'pages':>9}" + "".join(f"{share:>25}" for share in args.pair_shares))
    columns = [compare(prompts, args.pools, share) for share in args.pair_shares]
    for rows in zip(*columns, strict=True):
        cells = (f"{ours / 1e3:9.1f} {lru / 1e3:9.1f} {ours / lru:.4f}" for _, ours, lru in rows)
        print(f"{rows[0][0]:>9}" + "".join(f"{cell:>25}" for cell in cells), flush=True)
    print(f"{'page size':>9}{'insert':>8}{'match':>8}{'close':>8}{'evict':>8}  microseconds a page")
    for page_size in (16, 64):
        print(f"{page_size:>9}" + "".join(f"{each:8.2f}" for each in host_microseconds(page_size)))


if __name__ == "__main__":
    main()
