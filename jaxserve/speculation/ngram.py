"""Prompt lookup: a text goes on as it did where its last few tokens stood before (Saxena 2023)."""

from __future__ import annotations

from collections.abc import Sequence


class NgramDrafter:
    """Copies what followed the latest occurrence of the longest ending that occurs elsewhere in the text.

    Where one token is all that agrees, its latest occurrence tells little: what followed it most often is
    copied, with what came after that the last time.

    A copy that reaches the text's end goes on with itself, so that a text that repeats a period is drafted as
    far as is wanted. Each new token costs a look-up for each length of ending, however long the text is.
    """

    def __init__(self, min_ngram: int = 1, max_ngram: int = 4) -> None:
        """Args:
            min_ngram: tokens that must agree at least.
            max_ngram: tokens beyond which it does not count how many more agree.

        Raises ValueError unless 1 <= min_ngram <= max_ngram.
        """
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"n-grams of {min_ngram} to {max_ngram} tokens: it must be 1 <= min <= max")
        self._sizes = range(max_ngram, min_ngram - 1, -1)
        self._text: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}
        """For each n-gram of these sizes how many tokens the text had when it last ended in it."""
        self._times: dict[tuple[int, int], int] = {}
        """How often a token followed another."""
        self._usual: dict[int, tuple[int, int]] = {}
        """For each token how often the one that followed it most often did so, and where that stands last."""
        self._follower: int | None = None
        """Where that is which followed the text's ending before."""
        self._grade = 0

    @property
    def grade(self) -> int:
        """How many tokens agreed."""
        return self._grade

    def propose(self, tokens: Sequence[int], max_tokens: int) -> list[int]:
        """As `Drafter.propose`."""
        for token in tokens:
            self._append(token)
        if self._follower is None:
            return []
        copied = self._text[self._follower : self._follower + max_tokens]
        period = len(copied)  # Of a copy that was cut off by the text's end.
        return [copied[index % period] for index in range(max_tokens)]

    def agrees(self, num_tokens: int) -> bool:
        """Whether so many tokens, or more, agreed with those that the latest guess came after."""
        follower = self._follower or 0
        return (
            num_tokens <= follower
            and self._text[follower - num_tokens : follower] == self._text[-num_tokens:]
        )

    def _append(self, token: int) -> None:
        text = self._text
        text.append(token)
        length = len(text)
        if length > 1 and self._sizes[-1] == 1:
            before = text[-2]
            times = self._times[before, token] = self._times.get((before, token), 0) + 1
            if times >= self._usual.get(before, (0, 0))[0]:
                self._usual[before] = times, length - 1
        self._follower = None
        for size in self._sizes:
            if size > length:
                continue
            if size == 1:
                if self._follower is None and token in self._usual:
                    self._follower, self._grade = self._usual[token][1], 1
                continue
            ngram = tuple(text[-size:])
            if self._follower is None:
                self._follower, self._grade = self._ends.get(ngram), size
            self._ends[ngram] = length
