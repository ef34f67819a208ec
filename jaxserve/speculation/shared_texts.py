"""Answers that have ended, for others to be drafted from: those of one audience for that audience alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence

from jaxserve.speculation.ngram import NgramDrafter
from jaxserve.speculation.suffix_tree import SuffixTree, Text

DEPTH = 24
"""Tokens beyond which it does not count how many more agree."""
_MIN_MATCH = 2
"""One token alone says too little of what somebody else's text goes on with."""
_SHARED_GRADE = 8
"""From here on grades are of drafts from others' texts."""


class _Entry:
    """A text and how far it has got."""

    __slots__ = ("num_indexed", "num_removed", "scope", "size", "text")

    def __init__(self, scope: Hashable, text: Text) -> None:
        self.scope = scope
        """Whose it is."""
        self.text = text
        self.size = len(text.tokens) - 1 - _MIN_MATCH
        """Places: those that a match may begin at, with a token after it."""
        self.num_indexed = self.num_removed = 0
        """Of its places, from the first on."""


class SharedTexts:
    """Holds the latest texts of all audiences together up to a size, and says how each audience's went on.

    Making places findable costs time, so it is done little by little, by `work`. So many places at most are
    findable as the limit says, and so many at most wait to become so.
    """

    def __init__(self, max_tokens: int) -> None:
        """Raises ValueError if `max_tokens` is below 1."""
        if max_tokens < 1:
            raise ValueError(f"{max_tokens} tokens of shared texts: there must be 1 at least")
        self._max_tokens = max_tokens
        self._trees: dict[Hashable, SuffixTree] = {}
        self._entries: deque[_Entry] = deque()
        """The oldest first; those that wait come last, in the same order."""
        self._waiting: deque[_Entry] = deque()
        """Those that are not all findable; the first may be in part."""
        self._num_made = 0
        self.num_findable = 0
        """Places that can be found."""
        self.num_waiting = 0
        """Places that `work` has left to do."""

    @property
    def num_nodes(self) -> int:
        """Nodes of all trees, for tests of how much memory it may be."""
        return sum(tree.num_nodes for tree in self._trees.values())

    def add(self, scope: Hashable, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Take a text; `scope` is whose it is.

        Of the prompt only the end is kept, to tell what the answer's beginning followed: whoever asks the
        same has the rest in its own text, and in a conversation it is the answers before.
        """
        tokens = [*prompt[-(DEPTH - 1) :], *answer][-self._max_tokens - _MIN_MATCH :]
        entry = _Entry(scope, Text(self._num_made, tokens))
        if entry.size < 1:
            return
        self._num_made += 1
        self._entries.append(entry)
        self._waiting.append(entry)
        self.num_waiting += entry.size
        self.work(self.num_waiting - self._max_tokens)

    def work(self, num_places: int) -> None:
        """Make so many more places findable, if there are, and forget the oldest beyond the limit."""
        for _ in range(min(num_places, self.num_waiting)):
            if self.num_findable == self._max_tokens:
                self._remove_oldest()
            entry = self._waiting[0]
            tree = self._trees.get(entry.scope)
            if tree is None:
                tree = self._trees[entry.scope] = SuffixTree(DEPTH, _MIN_MATCH)
            tree.add(entry.text, entry.num_indexed)
            entry.num_indexed += 1
            self.num_findable += 1
            self.num_waiting -= 1
            if entry.num_indexed == entry.size:
                self._waiting.popleft()

    def clear(self, scope: Hashable | None = None) -> None:
        """Forget all, or what is one audience's."""
        kept = [] if scope is None else [entry for entry in self._entries if entry.scope != scope]
        self._entries = deque(kept)
        self._waiting = deque(entry for entry in kept if entry.num_indexed < entry.size)
        self._trees = {one: tree for one, tree in self._trees.items() if scope is not None and one != scope}
        self.num_findable = sum(entry.num_indexed - entry.num_removed for entry in kept)
        self.num_waiting = sum(entry.size - entry.num_indexed for entry in kept)

    def look_up(
        self, scope: Hashable, tokens: list[int], guess: int, max_tokens: int
    ) -> tuple[int, list[int]]:
        """How texts of the audience went on after the longest end of the tokens that one of them has.

        Args:
            scope: whose texts count.
            tokens: the latest, up to DEPTH - 1 of which are looked at.
            guess: how many will agree, which saves time where it is right.
            max_tokens: the most that are of use.

        Returns how many agree, and the tokens that came next; (0, []) where there is nothing to go by.
        """
        tree = self._trees.get(scope)
        match = None if tree is None else tree.longest(tokens, guess)
        if tree is None or match is None:
            return 0, []
        return match.length, tree.follow(match, max_tokens)

    def _remove_oldest(self) -> None:
        entry = self._entries[0]
        tree = self._trees[entry.scope]
        tree.remove(entry.text, entry.num_removed)
        entry.num_removed += 1
        self.num_findable -= 1
        if not tree:
            del self._trees[entry.scope]
        if entry.num_removed == entry.size:
            self._entries.popleft()


class SharedDrafter:
    """Drafts from an answer's own text or from those of its audience, by what has more in common with it."""

    def __init__(self, texts: SharedTexts, scope: Hashable) -> None:
        """Args:
        texts: those of all audiences.
        scope: whose are looked at.
        """
        self._texts = texts
        self._scope = scope
        self._own = NgramDrafter()
        self._latest: list[int] = []
        self._num_agreed = 0
        self._grade = 0

    @property
    def grade(self) -> int:
        """How many tokens agreed: in powers of two where they were others'."""
        return self._grade

    def propose(self, tokens: Sequence[int], max_tokens: int) -> list[int]:
        """As `Drafter.propose`."""
        own = self._own.propose(tokens, max_tokens)
        self._latest = [*self._latest, *tokens[1 - DEPTH :]][1 - DEPTH :]
        guess = self._num_agreed + len(tokens)
        self._num_agreed, drafts = self._texts.look_up(self._scope, self._latest, guess, max_tokens)
        if not drafts or (own and self._own.agrees(self._num_agreed)):
            self._grade = self._own.grade
            return own
        self._grade = _SHARED_GRADE + self._num_agreed.bit_length()
        return drafts
