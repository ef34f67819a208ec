"""Recorded traffic: when requests came, how long they were, and which prefixes they shared; never a text."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate

BLOCK_TOKENS = 512
"""Tokens that one prefix hash stands for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One request of a trace."""

    arrival: float
    """Seconds from the start of the trace."""
    prompt_tokens: int
    """Length of the prompt, at least 1."""
    output_tokens: int
    """Length of the answer, at least 1."""
    prefix_hashes: tuple[int, ...] = ()
    """One for each block of 512 prompt tokens, the last one perhaps partly filled: equal hashes from the
    first on are equal tokens. Empty: the prompt has nothing in common with any other."""
    tenant: str = ""
    priority: str = "default"

    def __post_init__(self) -> None:
        if not self.arrival >= 0:  # which NaN is not either
            raise ValueError(f"arrival {self.arrival} is not a number of seconds from 0 up")
        for name in ("prompt_tokens", "output_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} is below 1")
        num_blocks = -(-self.prompt_tokens // BLOCK_TOKENS)
        if self.prefix_hashes and len(self.prefix_hashes) != num_blocks:
            raise ValueError(
                f"prefix_hashes has {len(self.prefix_hashes)} entries; {self.prompt_tokens} prompt tokens "
                f"are {num_blocks} blocks of {BLOCK_TOKENS}"
            )


@dataclass(frozen=True)
class Trace:
    """Requests in the order of their arrival."""

    name: str
    requests: tuple[TraceRequest, ...]

    def __post_init__(self) -> None:
        arrivals = [request.arrival for request in self.requests]
        if arrivals != sorted(arrivals):
            raise ValueError(f"the requests of trace {self.name} are not in the order of their arrival")

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def seconds(self) -> float:
        """From the start to the last arrival."""
        return self.requests[-1].arrival if self.requests else 0.0

    def window(self, start: float, seconds: float) -> Trace:
        """The requests that arrive in [start, start + seconds), their clock started anew.

        Raises ValueError if there are none.
        """
        chosen = tuple(
            replace(request, arrival=request.arrival - start)
            for request in self.requests
            if start <= request.arrival < start + seconds
        )
        if not chosen:
            raise ValueError(
                f"trace {self.name} has no request between {start} and {start + seconds} s; "
                f"it lasts {self.seconds:.1f} s"
            )
        return Trace(self.name, chosen)

    def scaled(self, load: float) -> Trace:
        """The same requests, arriving `load` times as fast. Raises ValueError unless it is above 0."""
        if not load > 0:
            raise ValueError(f"load {load} is not above 0")
        return Trace(self.name, tuple(replace(r, arrival=r.arrival / load) for r in self.requests))

    def assigned(
        self,
        *,
        tenants: Mapping[str, float] | None = None,
        priorities: Mapping[str, float] | None = None,
        seed: int = 0,
    ) -> Trace:
        """The same requests, each given a tenant and a priority class at random by these shares.

        A conversation (what shares a prefix beyond its first block, which is often everybody's system
        prompt) stays with one tenant. The same seed gives the same assignment. None leaves things as
        they are. Raises ValueError for shares that are not positive.
        """
        requests = list(self.requests)
        if tenants is not None:
            pick = _Lottery("tenant", tenants, seed)
            requests = [replace(r, tenant=pick(_conversation(r, n))) for n, r in enumerate(requests)]
        if priorities is not None:
            pick = _Lottery("priority", priorities, seed)
            requests = [replace(r, priority=pick(str(n))) for n, r in enumerate(requests)]
        return Trace(self.name, tuple(requests))

    @property
    def ideal_reuse(self) -> float:
        """The share of prompt tokens that a cache of unbounded size would have seen before."""
        seen: set[int] = set()
        num_shared = 0
        for request in self.requests:
            depth = 0
            for known in request.prefix_hashes:
                if known not in seen:
                    break
                depth += 1
            num_shared += min(depth * BLOCK_TOKENS, request.prompt_tokens)
            seen.update(request.prefix_hashes)
        return num_shared / sum(request.prompt_tokens for request in self.requests)


class _Lottery:
    """Draws names by their shares: a fixed function of the seed and of whom it draws for."""

    def __init__(self, kind: str, shares: Mapping[str, float], seed: int) -> None:
        if not shares or min(shares.values()) <= 0:
            raise ValueError(f"{kind} shares {dict(shares)} are not all above 0")
        self._names = list(shares)
        self._bounds = list(accumulate(shares.values()))
        self._salt = f"{kind}\0{seed}\0"

    def __call__(self, drawn_for: str) -> str:
        digest = hashlib.blake2b((self._salt + drawn_for).encode(), digest_size=8).digest()
        point = int.from_bytes(digest, "big") / 2**64 * self._bounds[-1]
        return self._names[min(bisect_right(self._bounds, point), len(self._names) - 1)]


def _conversation(request: TraceRequest, number: int) -> str:
    if len(request.prefix_hashes) > 1:
        return f"block {request.prefix_hashes[1]}"
    return f"request {number}"
