"""Stop strings in a stream of text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache


@lru_cache(maxsize=256)
def _fallbacks(stop: str) -> tuple[int, ...]:
    """The failure function of Knuth, Morris and Pratt (1977), section 2.

    Entry i: the length of the longest proper prefix of `stop` that ends the first i + 1 characters.
    """
    fallbacks = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[index] != stop[length]:
            length = fallbacks[length - 1]
        length += stop[index] == stop[length]
        fallbacks[index] = length
    return tuple(fallbacks)


class _Pattern:
    """One stop string, and how much of it the text so far ends with."""

    __slots__ = ("_fallbacks", "matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._fallbacks = _fallbacks(stop)

    def find_end(self, text: str) -> int:
        """Take in more text; the number of its characters up to the first match's end, 0 for none."""
        stop, matched = self.stop, self.matched
        for index, character in enumerate(text):
            while matched and stop[matched] != character:
                matched = self._fallbacks[matched - 1]
            if stop[matched] == character:
                matched += 1
                if matched == len(stop):
                    return index + 1
        self.matched = matched
        return 0


class StopStringMatcher:
    """Lets text through up to the first stop string, wherever the pieces were cut.

    The match that ends first counts; of several that end together, the longest. Text that may be the
    beginning of a stop string is held back until that is settled. What a push costs depends on its own
    length and the stop strings', not on the text before.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        """`include` lets the stop string itself through. Raises ValueError for an empty stop string."""
        if "" in stops:
            raise ValueError("a stop string is empty")
        self._patterns = [_Pattern(stop) for stop in stops]
        self._first_characters = frozenset(stop[0] for stop in stops)
        self._include = include
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text."""

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that is now safe to show, and the stop string that was found, after which there is
        none."""
        if self.matched is not None:
            return "", self.matched
        if not self._held and self._first_characters.isdisjoint(text):
            return text, None
        seen = self._held + text
        ends = [(pattern.find_end(text), pattern.stop) for pattern in self._patterns]
        found = [(end, -len(stop), stop) for end, stop in ends if end]
        if found:
            end, negative_length, self.matched = min(found)
            cut = len(self._held) + end + (0 if self._include else negative_length)
            self._held = ""
            return seen[:cut], self.matched
        longest = max(self._patterns, key=lambda pattern: pattern.matched)
        self._held = longest.stop[: longest.matched]
        return seen[: len(seen) - longest.matched], None

    def finish(self) -> str:
        """The text held back, since no stop string came of it."""
        held, self._held = self._held, ""
        return held
