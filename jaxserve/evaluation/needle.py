"""A generated retrieval test: a number is hidden at some depth of a long text, and asked for at its end."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxserve.evaluation.prompt_sets import Case

_PEOPLE = ("The baker", "A traveller", "The old teacher", "My neighbour", "The captain", "A young painter")
_DEEDS = (
    "walked along the river",
    "repaired a wooden chair",
    "read the letters of a friend",
    "waited for the morning train",
    "planted beans behind the house",
    "listened to the rain",
)
_TIMES = ("before sunrise", "in the late autumn", "after the market had closed", "on a quiet Sunday")
_PLACES = ("Arden", "Belmont", "Corvo", "Dunmore", "Elsted", "Fairlie", "Galston", "Harwich")
_QUESTION = "\n\nWhat is the secret number of {place}? Answer with the number alone."


@dataclass(frozen=True)
class NeedleCase:
    """A case, and where in the grid it lies."""

    case: Case
    length: int
    """Tokens of the text and the question together, at most."""
    depth: float
    """Where the number stands: 0 at the beginning, 1 at the end."""


def make_needles(
    count_tokens: Callable[[str], int], lengths: Sequence[int], *, num_depths: int = 5, seed: int = 0
) -> list[NeedleCase]:
    """A case for each length and each of so many depths, evenly from 0 to 1; the same for the same seed.

    Args:
        count_tokens: of a text, by the model's tokenizer.
        lengths: in tokens, the question included, what a chat template adds not.
        num_depths: points on the way from beginning to end.
        seed: chooses the text, places and numbers.

    Raises ValueError for fewer than 1 depth, or a length in which nothing can be hidden.
    """
    if num_depths < 1:
        raise ValueError(f"{num_depths} depths; at least 1 is needed")
    depths = [i / (num_depths - 1) for i in range(num_depths)] if num_depths > 1 else [0.5]
    return [_make_needle(count_tokens, length, depth, seed) for length in lengths for depth in depths]


def _make_needle(count_tokens: Callable[[str], int], length: int, depth: float, seed: int) -> NeedleCase:
    rng = random.Random(f"{seed} {length} {depth}")
    place, number = rng.choice(_PLACES), rng.randrange(10_000, 100_000)
    needle = f"The secret number of {place} is {number}."
    question = _QUESTION.format(place=place)
    sentences: list[str] = []
    left = length - count_tokens(f"{needle}{question}")
    while left > 0:
        sentence = f"{rng.choice(_PEOPLE)} {rng.choice(_DEEDS)} {rng.choice(_TIMES)}."
        left -= count_tokens(f" {sentence}")
        sentences.append(sentence)
    text = _hidden(sentences, needle, depth) + question
    while sentences and count_tokens(text) > length:
        sentences.pop()
        text = _hidden(sentences, needle, depth) + question
    if not sentences:
        raise ValueError(f"a needle in {length} tokens: there is no room for a text to hide it in")
    name = f"needle/{length}"
    case = Case(
        source=f"{name} at {depth:.0%}",
        slice=name,
        messages=[{"role": "user", "content": text}],
        answer=str(number),
    )
    return NeedleCase(case, length, depth)


def _hidden(sentences: Sequence[str], needle: str, depth: float) -> str:
    place = round(depth * len(sentences))
    return " ".join([*sentences[:place], needle, *sentences[place:]])
