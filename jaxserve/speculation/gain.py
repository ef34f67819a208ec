"""How many drafts are worth their rows: from how often they are accepted, and what steps take."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

from jaxserve.plan import IntArray, StepShape

_FORGET = 0.9
"""What a verification still counts for after one more of the same answer."""
_PRIOR_WEIGHT = 2.0
"""In drafts, of what other answers have shown."""
_MEMORY = 16
"""Latest steps of a kind that tell what it usually takes."""
_MOMENT = 9
"""Latest steps, of whatever kind, that tell how fast the machine is now."""


class Acceptance:
    """How likely a draft is accepted, those before it being so; of one answer, or of all."""

    __slots__ = ("_hits", "_trials")

    def __init__(self) -> None:
        self._hits = self._trials = 0.0

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """So many drafts were verified at once. Those after the first wrong one say nothing."""
        trials = min(num_accepted + 1, num_drafted)
        self._hits = _FORGET * self._hits + num_accepted
        self._trials = _FORGET * self._trials + trials

    def rate(self, prior: float) -> float:
        """The chance, in (0, 1); `prior` is what it is like where little has been seen."""
        return (self._hits + _PRIOR_WEIGHT * prior) / (self._trials + _PRIOR_WEIGHT)


class StepKind(NamedTuple):
    """What the time of a step without prompt tokens depends on."""

    shape: StepShape
    num_rounds: int = 0
    """Tokens that the engine drafts one after another before it verifies them."""

    @property
    def size(self) -> int:
        """Grows with the work."""
        return self.shape.rows + self.num_rounds


class Slowness:
    """How long all steps take now, by what they usually do: machines are shared, and contexts grow."""

    def __init__(self) -> None:
        self.factor = 1.0
        self._latest: deque[float] = deque(maxlen=_MOMENT)

    def observe(self, factor: float) -> None:
        """A step took by so much longer. A pause of the machine is no news; a lasting change is."""
        self._latest.append(factor)
        if len(self._latest) == _MOMENT:
            self.factor = median(self._latest)


class StepSeconds:
    """How long steps of each kind take from one's end to the next one's, host and device together.

    It says what decoding gets through: of an overlapped step the host's work is hidden, and of one whose
    drafts wait for the step before it is not. What kinds take by one another is learnt slowly, and how fast
    all of them are at the moment from whichever is seen: what is rarely seen is not held to how the machine
    did then.
    """

    def __init__(self, slowness: Slowness | None = None) -> None:
        """`slowness`: shared with others that are to be compared with these."""
        self._slowness = slowness or Slowness()
        self._latest: defaultdict[StepKind, deque[float]] = defaultdict(lambda: deque(maxlen=_MEMORY))
        """As they would have been where the slowness is 1."""
        self._usual: dict[StepKind, float] = {}
        """The medians of these."""
        self._has_begun: set[StepKind] = set()
        self._known: dict[StepKind, tuple[int, float]] = {}
        """For each kind its size and what is known best: the median, or else a hint."""

    def observe(self, kind: StepKind, seconds: float) -> None:
        """A step took so long. The first of its kind is left out: it warms up."""
        if kind not in self._has_begun:
            self._has_begun.add(kind)
            return
        usual = self._usual.get(kind)
        if usual:
            self._slowness.observe(seconds / usual)
        latest = self._latest[kind]
        latest.append(seconds / self._slowness.factor)
        usual = self._usual[kind] = median(latest)
        self._known[kind] = kind.size, usual

    def hint(self, kind: StepKind, seconds: float) -> None:
        """A step that did something else took so long; it counts where nothing better is known."""
        if kind not in self._usual:
            seconds /= self._slowness.factor
            known = self._known.get(kind)
            self._known[kind] = kind.size, seconds if known is None else min(seconds, known[1])

    def typical(self, kind: StepKind) -> float | None:
        """Seconds of such a step now; None where none has been seen."""
        usual = self._usual.get(kind)
        return None if usual is None else usual * self._slowness.factor

    def predict(self, kind: StepKind) -> float:
        """Seconds of a step; of a kind not seen yet between what the next smaller and larger ones take, or
        as little as can be, so that it is tried. None takes longer than a larger one: it was a pause that it
        met when it was seen, and what nobody chooses is not seen again."""
        return self._predict(kind) * self._slowness.factor

    def _predict(self, kind: StepKind) -> float:
        size, known, points = kind.size, self._known.get(kind), self._known.values()
        larger = [point for point in points if point[0] > size]
        if known is not None:
            return min([known[1], *(seconds for _, seconds in larger)])
        smaller, low = max((point for point in points if point[0] <= size), default=(0, 0.0))
        larger_size, high = min(larger, default=(0, low))
        if not smaller or high <= low:
            return low
        return low + (high - low) * (size - smaller) / (larger_size - smaller)


def worthwhile_counts(
    rates: Sequence[float],
    lengths: Sequence[int],
    max_drafts: int,
    seconds: Callable[[int, int], float],
    *,
    num_decoding: int,
) -> IntArray:
    """How many of its drafts each sequence should have verified, so that most tokens come in a second.

    Args:
        rates: for each sequence with drafts how likely one is accepted if those before it are.
        lengths: how many it has.
        max_drafts: the most of all together.
        seconds: of a step that verifies so many, and of one sequence so many at most.
        num_decoding: sequences in the step; each gets a token in any case.

    Returns int32 [sequences].
    """
    # The chance that a draft becomes a token falls along an answer: the likeliest first keep its order.
    chances = [
        (rate**place, owner, place)
        for owner, (rate, length) in enumerate(zip(rates, lengths, strict=True))
        for place in range(1, length + 1)
    ]
    chances.sort(key=lambda chance: -chance[0])
    expected, longest, best, num_best = float(num_decoding), 0, 0.0, 0
    for number in range(min(len(chances), max_drafts) + 1):
        if number:
            expected += chances[number - 1][0]
            longest = max(longest, chances[number - 1][2])
        worth = expected / max(seconds(number, longest), 1e-9)
        if worth > best:
            best, num_best = worth, number
    return np.bincount([owner for _, owner, _ in chances[:num_best]], minlength=len(rates)).astype(np.int32)
