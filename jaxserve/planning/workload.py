"""Traffic as its planner knows it: how long prompts and answers are, what they share, how often they come."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from jaxserve.planning.traces import BLOCK_TOKENS, Trace, TraceRequest

_Z95 = NormalDist().inv_cdf(0.95)
MOST_SPREAD = math.exp(_Z95**2 / 2)
"""How much larger than its mean the 95th percentile of a log-normal distribution can be."""


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Log-normal lengths in tokens. Raises ValueError for ones that no such distribution has."""

    mean: float
    p95: float

    def __post_init__(self) -> None:
        if not 1 <= self.mean < math.inf:
            raise ValueError(f"a mean length of {self.mean:g} tokens is out of range: it must be 1 or more")
        if not 1 <= self.p95 / self.mean <= MOST_SPREAD:
            raise ValueError(
                f"a 95th percentile of {self.p95:g} tokens with a mean of {self.mean:g} is out of range: it "
                f"must be from {self.mean:g} to {MOST_SPREAD * self.mean:.0f}"
            )

    def sample(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """So many whole lengths in random order: evenly spaced quantiles, so that few have the mean too."""
        spread = _Z95 - math.sqrt(max(_Z95**2 - 2 * math.log(self.p95 / self.mean), 0.0))
        middle = math.log(self.mean) - spread**2 / 2
        normal = NormalDist()
        points = np.array([normal.inv_cdf((place + 0.5) / count) for place in range(count)])
        lengths = np.maximum(np.rint(np.exp(middle + spread * points)), 1).astype(np.int64)
        return rng.permutation(lengths)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What requests are like; not when they come."""

    prompt: Lengths
    output: Lengths
    reuse: float = 0.0
    """Share of the prompts' tokens that earlier prompts began with, in the mean."""

    def __post_init__(self) -> None:
        if not 0 <= self.reuse < 1:
            raise ValueError(f"a reuse of {self.reuse:g} is out of range: it must be from 0 to below 1")

    def trace(self, count: int, *, longest: int, seed: int = 0) -> Trace:
        """So many requests that come as a Poisson process, one a second in the mean.

        Args:
            count: how many, at least 1.
            longest: tokens of prompt and answer together, to which the few longest requests are cut.
            seed: of lengths and arrivals.

        Raises ValueError where more than one of twenty would be cut.
        """
        if self.prompt.p95 + self.output.p95 > longest:
            raise ValueError(
                f"prompts of {self.prompt.p95:g} and answers of {self.output.p95:g} tokens, the 95th "
                f"percentiles, are together longer than the {longest} tokens that a sequence may have"
            )
        rng = np.random.default_rng(seed)
        arrivals = np.cumsum(rng.exponential(1.0, count))
        arrivals *= count / arrivals[-1]
        prompts, outputs = self.prompt.sample(count, rng), self.output.sample(count, rng)
        shared = rng.random(count)
        requests: list[TraceRequest] = []
        for number in range(count):
            prompt_tokens = min(int(prompts[number]), longest - 1)
            requests.append(
                TraceRequest(
                    arrival=float(arrivals[number]),
                    prompt_tokens=prompt_tokens,
                    output_tokens=min(int(outputs[number]), longest - prompt_tokens),
                    prefix_hashes=self._hashes(number, prompt_tokens, float(shared[number])),
                )
            )
        return Trace("workload", tuple(requests))

    def _hashes(self, number: int, prompt_tokens: int, draw: float) -> tuple[int, ...]:
        """Whole blocks are shared: of short prompts some and others not, so that the mean is as asked for."""
        if not self.reuse:
            return ()
        num_blocks = -(-prompt_tokens // BLOCK_TOKENS)
        num_shared, rest = divmod(self.reuse * prompt_tokens, BLOCK_TOKENS)
        next_block = min(BLOCK_TOKENS, prompt_tokens - int(num_shared) * BLOCK_TOKENS)
        num_shared = int(num_shared) + (draw * next_block < rest)
        common = tuple(range(1, num_shared + 1))
        own = tuple((number + 1 << 24) + block for block in range(num_shared, num_blocks))
        return common + own


def at_once(trace: Trace) -> Trace:
    """The same requests, all of them there from the start."""
    return Trace(
        trace.name,
        tuple(
            TraceRequest(
                arrival=0.0,
                prompt_tokens=one.prompt_tokens,
                output_tokens=one.output_tokens,
                prefix_hashes=one.prefix_hashes,
                tenant=one.tenant,
                priority=one.priority,
            )
            for one in trace.requests
        ),
    )
