"""The tree of texts' places against a plain search of all texts."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import given

from jaxserve.speculation.suffix_tree import SuffixTree, Text

Place = tuple[Text, int]


class PlainSearch:
    """Knows the places in the order in which they were added, and looks at every one of them."""

    def __init__(self, places: list[Place], depth: int, min_match: int) -> None:
        self._places = places
        self._depth = depth
        self._min_match = min_match

    def _occurrences(self, tokens: list[int]) -> list[tuple[Text, int]]:
        """Where a token follows that the text has, and the place of this one; the latest occurrence last."""
        return [
            (text, place + len(tokens))
            for text, place in self._places
            if text.tokens[place : place + len(tokens)] == tokens
            and place + len(tokens) < len(text.tokens) - 1
        ]

    def longest(self, tokens: list[int]) -> int:
        for number in range(min(len(tokens), self._depth - 1), self._min_match - 1, -1):
            if self._occurrences(tokens[-number:]):
                return number
        return 0

    def follow(self, tokens: list[int], max_tokens: int) -> list[int]:
        seen = list(tokens)
        while len(seen) < len(tokens) + max_tokens:
            found = self._occurrences(seen[: self._depth])
            following = [text.tokens[at] for text, at in found]
            if not following:
                break
            if len(seen) < self._depth:
                counts = Counter(following)
                seen.append(max(reversed(following), key=counts.__getitem__))
                continue
            # What followed most is not known any more: as in the latest text that had all this.
            text, at = next(
                (text, place + self._depth)
                for text, place in reversed(self._places)
                if text.tokens[place : place + self._depth] == seen[: self._depth]
            )
            seen += text.tokens[at:-1]
            break
        return seen[len(tokens) : len(tokens) + max_tokens]


TOKENS = st.lists(st.integers(0, 2), max_size=14)


@given(
    texts=st.lists(TOKENS, max_size=6),
    kept=st.integers(1, 30),
    depth=st.integers(2, 7),
    questions=st.lists(st.tuples(TOKENS, st.integers(0, 9)), min_size=1, max_size=4),
    max_tokens=st.integers(1, 9),
    data=st.data(),
)
def test_as_a_search_of_all_texts(
    texts: list[list[int]],
    kept: int,
    depth: int,
    questions: list[tuple[list[int], int]],
    max_tokens: int,
    data: st.DataObject,
) -> None:
    min_match = data.draw(st.integers(1, depth - 1))
    tree = SuffixTree(depth, min_match)
    places: list[Place] = []
    for number, tokens in enumerate(texts):
        text = Text(number, tokens)
        for place in range(len(tokens) - min_match):
            if len(places) == kept:
                tree.remove(*places.pop(0))
            tree.add(text, place)
            places.append((text, place))
    assert bool(tree) == bool(places)
    assert tree.num_nodes <= 2 * len(places)
    search = PlainSearch(places, depth, min_match)
    for tokens, guess in questions:
        match = tree.longest(tokens, guess)
        assert (0 if match is None else match.length) == search.longest(tokens)
        if match is not None:
            expected = search.follow(tokens[-match.length :], max_tokens)
            assert tree.follow(match, max_tokens) == expected != []
    for text, place in places:
        tree.remove(text, place)
    assert not tree
    assert tree.num_nodes == 0


def test_what_followed_most_often_wins_and_then_what_followed_last() -> None:
    tree = SuffixTree(4, 1)
    for number, tokens in enumerate([[1, 2, 3], [1, 2, 4, 9], [1, 2, 3], [7, 5], [7, 6]]):
        text = Text(number, tokens)
        for place in range(len(tokens) - 1):
            tree.add(text, place)
    often, last = tree.longest([8, 1, 2], 1), tree.longest([7], 1)
    assert often is not None
    assert last is not None
    assert (often.length, tree.follow(often, 5)) == (2, [3])
    assert (last.length, tree.follow(last, 5)) == (1, [6])
    assert tree.longest([4, 8], 1) is None


@pytest.mark.parametrize(("depth", "min_match"), [(3, 0), (3, 3), (1, 1)])
def test_impossible_sizes_are_refused(depth: int, min_match: int) -> None:
    with pytest.raises(ValueError, match="1 <= match < depth"):
        SuffixTree(depth, min_match)
