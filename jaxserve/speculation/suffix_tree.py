"""How texts went on after what they have in common: a compressed tree of what follows each of their places.

After SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975). Each place of a text adds a path, the tokens from
there on to a fixed depth; a node counts the paths through it, so that the tree knows how often any few tokens
were followed by which. Edges name a piece of the latest text that passed instead of holding tokens: a place
costs two nodes at most. Places are taken out in the order in which they came in, which is why an edge never
names a text that has gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

_END = -1
"""Follows the last token, so that no path is the beginning of another."""


class Text:
    """A text whose places are in a tree, or will be. Later texts have higher numbers."""

    __slots__ = ("number", "tokens")

    def __init__(self, number: int, tokens: Sequence[int]) -> None:
        self.number = number
        self.tokens = [*tokens, _END]


class _Node:
    """An edge and what lies below it."""

    __slots__ = ("children", "count", "length", "start", "text")

    def __init__(self, text: Text, start: int, length: int, count: int) -> None:
        self.text = text
        """The latest that passed."""
        self.start = start
        """Where its tokens are those of the edge."""
        self.length = length
        self.count = count
        """Paths that pass."""
        self.children: dict[int, _Node] | None = None
        """By first token."""


class Match(NamedTuple):
    """Where in the tree the end of a text stands too."""

    length: int
    """Tokens that agree."""
    node: _Node
    offset: int
    """On its edge, from 1 up."""


class SuffixTree:
    """Of texts of one audience."""

    def __init__(self, depth: int, min_match: int) -> None:
        """Args:
            depth: tokens of a path. Matches are shorter by one at least, so that it is known what followed.
            min_match: the fewest tokens of a match.

        Raises ValueError unless 1 <= min_match < depth.
        """
        if not 1 <= min_match < depth:
            raise ValueError(f"matches of {min_match} tokens in a tree of depth {depth}: 1 <= match < depth")
        self._depth = depth
        self._min_match = min_match
        self._root: dict[int, _Node] = {}

    def __bool__(self) -> bool:
        """Whether there is anything in it."""
        return bool(self._root)

    @property
    def num_nodes(self) -> int:
        """Nodes, counted one by one."""
        waiting, number = [self._root], 0
        while waiting:
            children = waiting.pop()
            number += len(children)
            waiting += [node.children for node in children.values() if node.children is not None]
        return number

    def add(self, text: Text, place: int) -> None:
        """Add the path from a place of the text. At most `depth` steps."""
        tokens, children = text.tokens, self._root
        end = min(place + self._depth, len(tokens))
        while True:
            node = children.get(tokens[place])
            if node is None:
                children[tokens[place]] = _Node(text, place, end - place, 1)
                return
            common = _num_common(node, tokens, place)
            if common < node.length:
                node = children[tokens[place]] = _split(node, common)
            node.count += 1
            node.text, node.start = text, place
            place += common
            if node.children is None:
                return  # The same path has been there before.
            children = node.children

    def remove(self, text: Text, place: int) -> None:
        """Take out the path from a place, which must be the one that was added before all others."""
        tokens, children = text.tokens, self._root
        above: _Node | None = None
        while True:
            node = children[tokens[place]]
            node.count -= 1
            if not node.count:
                del children[tokens[place]]
                if above is not None and len(children) == 1:
                    _join(above, *children.values())
                return
            place += node.length
            if node.children is None:
                return
            above, children = node, node.children

    def longest(self, tokens: list[int], guess: int) -> Match | None:
        """The longest end of the tokens that some text has too, with something after it.

        Args:
            tokens: as many of the latest as a match may have, at least.
            guess: how many will agree. If that is right it takes two look-ups, else some more.
        """
        # What does not occur does not occur with more before it either.
        agree, fail, found = self._min_match - 1, min(len(tokens), self._depth - 1) + 1, None
        number = guess = min(max(guess, self._min_match), fail - 1)
        while agree + 1 < fail:
            match = self._find(tokens, number)
            if match is None:
                fail = number
            else:
                agree, found = number, match
            number = guess + 1 if agree == guess else (agree + fail) // 2
        return found

    def follow(self, match: Match, max_tokens: int) -> list[int]:
        """As texts went on most often, the latest among equals; beyond the tree's depth as the latest did."""
        _, node, offset = match
        drafts: list[int] = []
        while True:
            first = node.start + offset
            num_left = max_tokens - len(drafts)
            if node.children is None:  # To the end of that text, which begins with what is left of the edge.
                drafts += node.text.tokens[first : first + num_left]
                return drafts[:-1] if drafts[-1:] == [_END] else drafts
            drafts += node.text.tokens[first : first + min(num_left, node.length - offset)]
            following = _most_seen(node.children) if len(drafts) < max_tokens else None
            if following is None:
                return drafts
            node, offset = following, 0

    def _find(self, tokens: list[int], number: int) -> Match | None:
        """Where the last so many tokens stand, if something follows."""
        end, place = len(tokens), len(tokens) - number
        children: dict[int, _Node] | None = self._root
        while True:
            node = None if children is None else children.get(tokens[place])
            if node is None:
                return None
            length, text = min(node.length, end - place), node.text.tokens
            if text[node.start : node.start + length] != tokens[place : place + length]:
                return None
            place += length
            if place == end:
                break
            children = node.children
        if length < node.length:
            goes_on = text[node.start + length] != _END
        else:
            goes_on = node.children is not None and node.children.keys() != {_END}
        return Match(number, node, length) if goes_on else None


def _num_common(node: _Node, tokens: list[int], place: int) -> int:
    """Tokens of the edge that are those from `place` on; the first one is."""
    text, first, length = node.text.tokens, node.start, node.length
    if text[first : first + length] == tokens[place : place + length]:
        return length
    return next(number for number in range(1, length) if text[first + number] != tokens[place + number])


def _split(node: _Node, length: int) -> _Node:
    """Cut the edge after so many tokens; return the upper part, which has the lower one below it."""
    upper = _Node(node.text, node.start, length, node.count)
    node.start += length
    node.length -= length
    upper.children = {node.text.tokens[node.start]: node}
    return upper


def _join(node: _Node, only: _Node) -> None:
    """Make one edge of two: only one path is left of those that parted there."""
    # Whatever passed through the lower one had come from the upper one: its tokens stand before.
    node.text, node.start = only.text, only.start - node.length
    node.length += only.length
    node.children = only.children


def _most_seen(children: dict[int, _Node]) -> _Node | None:
    """The child that most paths have passed through, the latest among equals; None where texts only end."""
    nodes = [node for token, node in children.items() if token != _END]
    return max(nodes, key=lambda node: (node.count, node.text.number, node.start), default=None)
