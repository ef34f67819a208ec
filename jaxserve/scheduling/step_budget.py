"""How many prompt tokens a step may compute beside the running answers, so that these stay fluent."""

from __future__ import annotations

from math import inf

import numpy as np

from jaxserve.plan import EngineLimits, StepShape

_FEATURES = 3
_SCALE = 256.0
_SCALES = np.array([1.0, _SCALE, _SCALE])
_PRIOR = np.array([2e-3, 2e-5, 0.0]) * _SCALES
"""Seconds for a step, for 256 rows of its shape and for 256 rows in use, until something is measured."""
_PRIOR_WEIGHT = 1e-2
"""In steps: just enough to fill in what has not been measured."""
_FORGET = 0.995
"""What a measured step still counts for after one more: the last few hundred matter."""
_OUTLIER_ERRORS, _OUTLIER_PART = 4.0, 0.25
"""A step that is off by more typical errors, and this part of what was expected, is a hiccup."""
_EAGER = 32
"""Steps at first after each of which the model is solved; then once in as many."""


class StepTimes:
    """Predicts a step's seconds: a + b * rows of the compiled shape + c * rows in use, and a correction for
    each shape that has been measured.

    Weighted least squares over the latest steps. A measurement far from what was expected is cut to where
    outliers begin: a pause of the machine teaches next to nothing, while a lasting change is learnt within
    some dozens of steps.
    """

    def __init__(self) -> None:
        # Fading sums over the steps, features scaled: of products of two features (upper triangle), and of
        # each feature with the seconds. Plain numbers: this runs in every step, on very few of them.
        self._products = [0.0] * 6
        self._moments = [0.0] * _FEATURES
        self._coefficients: list[float] = (_PRIOR / _SCALES).tolist()
        self._corrections: dict[int, float] = {}
        self._error = 0.0
        self._num_seen = 0

    def predict(self, shape_rows: int, num_rows: int) -> float:
        """Seconds of a step of that shape with so many rows in use."""
        return max(self._trend(shape_rows, num_rows) + self._corrections.get(shape_rows, 0.0), 0.0)

    def most_rows(self, shape_rows: int, seconds: float) -> float:
        """Rows in use with which a step of that shape takes so long; negative if it always takes longer."""
        left = seconds - self._trend(shape_rows, 0) - self._corrections.get(shape_rows, 0.0)
        per_row = self._coefficients[2]
        return left / per_row if per_row > 0.0 else inf if left >= 0.0 else -1.0

    def observe(self, shape_rows: int, num_rows: int, seconds: float) -> None:
        """A step took so long. Raises ValueError for a time that no clock could show."""
        if not 0.0 <= seconds < inf:
            raise ValueError(f"a step cannot take {seconds} seconds")
        seconds = self._without_hiccup(self.predict(shape_rows, num_rows), seconds)
        shape, used = shape_rows / _SCALE, num_rows / _SCALE
        products = (1.0, shape, used, shape * shape, shape * used, used * used)
        moments = (seconds, shape * seconds, used * seconds)
        self._products = [_FORGET * old + new for old, new in zip(self._products, products, strict=True)]
        self._moments = [_FORGET * old + new for old, new in zip(self._moments, moments, strict=True)]
        self._num_seen += 1
        if self._num_seen <= _EAGER or self._num_seen % _EAGER == 0:
            self._solve()
        correction = self._corrections.get(shape_rows, 0.0)
        missed = seconds - self._trend(shape_rows, num_rows) - correction
        self._corrections[shape_rows] = correction + missed / 8

    def _trend(self, shape_rows: int, num_rows: int) -> float:
        base, per_shape_row, per_row = self._coefficients
        return base + per_shape_row * shape_rows + per_row * num_rows

    def _without_hiccup(self, expected: float, seconds: float) -> float:
        surprise = seconds - expected
        if self._num_seen >= _EAGER:
            limit = _OUTLIER_ERRORS * self._error + _OUTLIER_PART * expected
            surprise = min(max(surprise, -limit), limit)
        self._error += (abs(surprise) - self._error) / min(self._num_seen + 1, 64)
        return expected + surprise

    def _solve(self) -> None:
        """Least squares under the rule that nothing takes less time by being more."""
        ones, shape, used, shape_shape, shape_used, used_used = self._products
        sums = [[ones, shape, used], [shape, shape_shape, shape_used], [used, shape_used, used_used]]
        gram = np.array(sums) + _PRIOR_WEIGHT * np.eye(_FEATURES)
        moment = _PRIOR_WEIGHT * _PRIOR + self._moments
        kept = list(range(_FEATURES))
        solution = np.zeros(_FEATURES)
        while kept:
            part = np.linalg.solve(gram[np.ix_(kept, kept)], moment[kept])
            if part.min() >= 0.0:
                solution[kept] = part
                break
            del kept[int(part.argmin())]
        self._coefficients = (solution / _SCALES).tolist()


_LEAST_STRETCH = 1.5
"""What prompts may make of a step that is beyond the target without them."""
_MOST_BEYOND = 0.5
"""Of the target, what a step may take beyond it if those before it took less."""


class TokenBudget:
    """Chooses how much prompt goes into a step, on the ladder of compiled shapes."""

    def __init__(
        self, limits: EngineLimits, *, max_chunk: int | None = None, headroom: float = 0.9, max_pause: int = 8
    ) -> None:
        """Args:
            limits: the compiled shapes.
            max_chunk: the most prompt tokens in a step; by default as many as the largest shape holds.
            headroom: part of the target that a step's predicted time may take.
            max_pause: steps in a row that may have no prompt token while answers are at their target.

        Raises ValueError for values out of range.
        """
        largest = limits.chunk_shapes[-1].rows
        self._max_chunk = largest if max_chunk is None else max_chunk
        if not 1 <= self._max_chunk <= largest:
            raise ValueError(f"max_chunk {max_chunk} is out of range: it must be from 1 to {largest}")
        if not 0.0 < headroom <= 1.0:
            raise ValueError(f"headroom {headroom} is out of range: it must be above 0 and at most 1")
        if max_pause < 0:
            raise ValueError(f"max_pause {max_pause} is negative")
        self._limits = limits
        self._headroom = headroom
        self._max_pause = max_pause
        self._num_paused = 0
        self._saved = 0.0
        """Seconds that the latest steps took less than the target: it is one for the mean."""
        self.times = StepTimes()

    def observe(self, shape_rows: int, num_rows: int, seconds: float) -> None:
        """A step of `shape_rows` compiled rows, `num_rows` of them in use, took so long."""
        self.times.observe(shape_rows, num_rows, seconds)

    def seconds_per_token(self) -> float:
        """What one more prompt token costs, in a step that is full of them."""
        rows = self._limits.chunk_shapes[-1].rows
        return self.times.predict(rows, rows) / rows

    def budget(self, num_decoding: int, tightest_tpot: float = inf) -> int:
        """Prompt tokens that the next step may compute; ask only when there is a prompt to compute.

        The largest shape whose predicted time keeps `tightest_tpot`, the lowest target in seconds among the
        `num_decoding` requests that have a row each, less these rows. Steps keep it in the mean, so that
        large shapes and small ones take turns where shapes lie far apart; none takes half as long again.
        If not even the smallest keeps it, 0 in most steps, and that smallest one's room in one of
        `max_pause` + 1, so that prompts move on. A target that a step without any prompt would miss asks
        only that prompts make it half as long again.
        """
        ladder = self._limits.chunk_shapes
        shapes = [shape for shape in ladder if self._room(shape, num_decoding)]
        if not shapes:
            largest = ladder[-1]  # Whatever is left beside the answers, little as it is.
            return max(0, min(largest.rows - num_decoding, self._max_chunk))
        target = self._target(num_decoding, tightest_tpot)
        if target == inf:
            return self._room(self._fill(shapes, num_decoding), num_decoding)
        self._saved = min(self._saved, target)
        allowed = target + min(self._saved, _MOST_BEYOND * target)
        kept = [shape for shape in shapes if self.times.predict(shape.rows, shape.rows) <= allowed]
        if not kept and self._num_paused < self._max_pause:
            self._num_paused += 1
            self._saved += max(target - self._alone(num_decoding), 0.0)
            return 0
        self._num_paused = 0
        shape = self._fill(kept, num_decoding) if kept else shapes[0]
        self._saved = max(self._saved + target - self.times.predict(shape.rows, shape.rows), 0.0)
        return self._room(shape, num_decoding)

    def max_decoding(self, tightest_tpot: float) -> int:
        """Answers that can go on side by side in steps that keep `tightest_tpot`; no bound, which is the
        number of slots, where a step for a single one would miss it."""
        # An answer has a row in one of as many steps as there are groups.
        num_groups, shapes = self._limits.decode_groups, self._limits.decoding_shapes
        limit = self._headroom * tightest_tpot / num_groups
        if limit == inf or self.times.predict(shapes[0].rows, 1) > limit:
            return self._limits.num_slots
        for shape, smaller in zip(shapes[:0:-1], shapes[-2::-1], strict=True):
            most = self.times.most_rows(shape.rows, limit)
            if most > smaller.rows:
                return num_groups * int(min(most, shape.rows))
        return num_groups * shapes[0].rows

    def _target(self, num_decoding: int, tightest_tpot: float) -> float:
        """Seconds that the next step may take."""
        if not num_decoding or tightest_tpot == inf:
            return inf
        alone = self._alone(num_decoding)
        return max(tightest_tpot * self._headroom, alone * _LEAST_STRETCH if alone > tightest_tpot else 0.0)

    def _alone(self, num_decoding: int) -> float:
        """Seconds in which each of the answers moves on by a token without any prompt."""
        num_groups = self._limits.decode_groups
        used = -(-num_decoding // num_groups)
        rows = next((shape.rows for shape in self._limits.decoding_shapes if shape.rows >= used), used)
        return num_groups * self.times.predict(rows, used)

    def _fill(self, shapes: list[StepShape], num_decoding: int) -> StepShape:
        """The largest shape that `max_chunk` can fill, to the row: a chunk that spilled a few rows into the
        next shape would pay for all of it. Only if that leaves less than half a chunk, a larger one."""
        for shape in shapes:
            if shape.rows >= max(self._max_chunk, 2 * num_decoding):
                return shape
        return shapes[-1]

    def _room(self, shape: StepShape, num_decoding: int) -> int:
        """Prompt tokens that fit beside the answers; 0 if so few that the shape is not worth its price."""
        room = shape.rows - num_decoding
        if min(shape.sequences, shape.logit_rows) <= num_decoding or room < max(1, shape.rows // 8):
            return 0
        return min(room, self._max_chunk)
