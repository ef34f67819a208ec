"""What prompts have in common: as prefixes, which a cache can reuse, and anywhere, which it cannot.

A prompt is a sequence of units: words and spaces of a text, token ids, or a trace's block hashes.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

Units = Sequence[Hashable]

CONTEXT_CHARACTERS = 40
_MORE_IN_COMMON = 0.1
"""Share of a prompt that is others' too, beyond its beginning, where it is said to part from them: less comes
of blocks that are cut, and of sampling."""
_WORDS = re.compile(r"\w+|\s+|[^\w\s]")
_CHANGING = (
    ("a date or a time", re.compile(r"\d{4}-\d\d-\d\d|\d{1,2}:\d\d(:\d\d)?|\d{1,2}/\d{1,2}/\d{2,4}")),
    (
        "an identifier",
        re.compile(r"\b(?=\w*\d)(?=\w*[a-fA-F])[0-9a-fA-F]{6,}\b|[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-"),
    ),
    ("a number", re.compile(r"\d")),
)


@dataclass(frozen=True, kw_only=True)
class Grain:
    """How finely prompts are compared."""

    block: int
    """Units that are reused together or not at all, as a page's tokens are."""
    shingle: int
    """Units in a row that have to be equal to count as repeated: fewer are everyday phrases."""
    sampling: int
    """Of the shingles one in so many is remembered, by its content, so that equal ones are chosen alike."""
    unit_tokens: int = 1
    """Tokens that a unit stands for."""


WORDS = Grain(block=16, shingle=8, sampling=4)
"""For words and token ids."""


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """Where prompts begin to differ that have more in common further on."""

    position: int
    """The first differing character of a text, or token."""
    unit: str
    """"character" or "token"."""
    num_prompts: int
    """That differ from an earlier one after the same beginning."""
    before: str
    """What stands before it, in both."""
    first: str
    """How one of them goes on there."""
    second: str
    """How another does."""

    @property
    def kind(self) -> str | None:
        """What it is that differs, if it looks like something that changes with every request."""
        # What differs may begin within a date: its first figures are before the position.
        start = re.search(r"[\w:/.-]*$", self.before)
        lead = start.group() if start else ""
        shown = [lead + text for text in (self.first, self.second)]
        for name, pattern in _CHANGING:
            if all((match := pattern.search(text)) and match.start() <= len(lead) for text in shown):
                return name
        return None


@dataclass(frozen=True, kw_only=True)
class Repeats:
    """What a sequence of prompts repeats, as shares of their units from 0 to 1."""

    prefix_share: float
    """What a prefix cache without bounds would have found."""
    repeated_share: float
    """What stood somewhere in an earlier prompt, wherever it did."""
    divergence: Divergence | None
    """Where most begin to differ; None where none goes on alike after that."""


def split_words(text: str) -> list[str]:
    """A text as words, spaces and marks; put together they are the text."""
    return _WORDS.findall(text)


def find_repeats(prompts: Sequence[Units], grain: Grain = WORDS) -> Repeats:
    """What prompts repeat of those before them. Raises ValueError if they are all empty."""
    num_units = sum(map(len, prompts))
    if not num_units:
        raise ValueError("the prompts hold nothing")
    prefixes: dict[int, int] = {}
    shingles: dict[int, int] = {}
    num_shared = num_shingles = num_seen = 0
    partings: list[tuple[int, int]] = []
    for number, prompt in enumerate(prompts):
        keys = _prefix_keys(prompt, grain.block)
        depth = next((depth for depth, key in enumerate(keys) if key not in prefixes), len(keys))
        # Of a block that is begun, as much counts as is alike.
        length = common_length(prompt, prompts[prefixes[keys[depth - 1]]]) if depth else 0
        num_shared += length
        own = _shingles(prompt, grain)
        partners = Counter(shingles[key] for key in own if key in shingles)
        num_shingles, num_seen = num_shingles + len(own), num_seen + partners.total()
        if partners and partners.total() / len(own) >= length / len(prompt) + _MORE_IN_COMMON:
            partings.append((number, partners.most_common(1)[0][0]))
        prefixes.update(dict.fromkeys(keys, number))
        shingles.update(dict.fromkeys(own, number))
    return Repeats(
        prefix_share=num_shared / num_units,
        repeated_share=num_seen / num_shingles if num_shingles else 0.0,
        divergence=_common_parting(prompts, partings, grain.unit_tokens),
    )


def _prefix_keys(prompt: Units, block: int) -> list[int]:
    """A key for each full block: equal ones have all before them in common."""
    keys: list[int] = []
    key = 0
    for end in range(block, len(prompt) + 1, block):
        key = hash((key, *prompt[end - block : end]))
        keys.append(key)
    return keys


def _shingles(prompt: Units, grain: Grain) -> list[int]:
    """Keys of the shingles that are remembered, in their order."""
    spelled = [str(unit).encode() for unit in prompt]
    keys = (
        zlib.crc32(b"\0".join(spelled[start : start + grain.shingle]))
        for start in range(len(spelled) - grain.shingle + 1)
    )
    return [key for key in keys if key % grain.sampling == 0]


def _common_parting(
    prompts: Sequence[Units], partings: Sequence[tuple[int, int]], unit_tokens: int
) -> Divergence | None:
    """The beginning after which most prompts differ from the one that they have most in common with."""
    places: dict[tuple[int, Hashable], list[tuple[int, int]]] = {}
    for number, partner in partings:
        length = common_length(prompts[number], prompts[partner])
        # The word before it tells places apart that are the same in number only.
        last = prompts[number][length - 1] if length else None
        places.setdefault((length, last), []).append((number, partner))
    if not places:
        return None
    (length, _), pairs = max(places.items(), key=lambda place: (len(place[1]), -place[0][0]))
    number, partner = pairs[0]
    return _divergence(prompts[partner], prompts[number], length, len(pairs), unit_tokens)


def common_length(first: Units, second: Units) -> int:
    """Units that two prompts begin with alike."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def _divergence(first: Units, second: Units, length: int, num_prompts: int, unit_tokens: int) -> Divergence:
    if all(isinstance(unit, str) for unit in first[: length + 1]):
        whole, other = "".join(map(str, first)), "".join(map(str, second))
        position = common_length(whole, other)
        shown = [text[position : position + CONTEXT_CHARACTERS] for text in (whole, other)]
        before = whole[max(0, position - CONTEXT_CHARACTERS) : position]
        return Divergence(
            position=position,
            unit="character",
            num_prompts=num_prompts,
            before=before,
            first=shown[0],
            second=shown[1],
        )
    parts = [" ".join(map(str, prompt[length : length + 8])) for prompt in (first, second)]
    return Divergence(
        position=length * unit_tokens,
        unit="token",
        num_prompts=num_prompts,
        before=" ".join(map(str, first[max(0, length - 8) : length])),
        first=parts[0],
        second=parts[1],
    )
