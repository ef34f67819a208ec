"""A text that arrives in pieces, read as if it were whole."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from typing import TypeVar

_T = TypeVar("_T")
Waiting = Generator[None, None, _T]
"""A reader: it yields where it needs more text, and returns what it has read."""

_SPACE = re.compile(r"\s*")
_OUTSIDE_STRINGS = re.compile(r'[^"{}\[\]]*')
_INSIDE_STRING = re.compile(r'[^"\\]*')
_SCALAR = re.compile(r"[^\s,{}\[\]\"]*")


class MalformedError(Exception):
    """The text is not what the reader expected. What it has not used up begins at the fault."""


def _ignore(piece: str) -> None:
    """Nobody wants this piece."""


class TextSource:
    """Holds what has arrived and was not yet used up; and what was, since the mark.

    The readers do not depend on how the text is cut, but for the pieces in which a value is handed on.
    """

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._mark = 0
        self.ended = False
        """No more text comes."""

    def extend(self, text: str) -> None:
        self._text = self._text[self._mark :] + text
        self._at -= self._mark
        self._mark = 0

    def mark(self) -> None:
        """What is used up from here on can still be taken back as text."""
        self._mark = self._at

    def since_mark(self) -> str:
        """What was used up since the mark, which moves here."""
        text = self._text[self._mark : self._at]
        self.mark()
        return text

    def take_before(self, tag: str) -> tuple[str, bool]:
        """Use up the text that surely comes before a tag, and the tag if it is there, from the mark on.

        Returns that text and whether the tag was found. The start of a tag that may yet be completed stays.
        """
        found = self._text.find(tag, self._at)
        end = found if found >= 0 else len(self._text) - self._num_begun(tag)
        before, self._at = self._text[self._at : end], end
        self.mark()
        if found >= 0:
            self._at += len(tag)
        return before, found >= 0

    def rest(self) -> str:
        """Use up all that has arrived."""
        self._at = len(self._text)
        return self.since_mark()

    def _num_begun(self, tag: str) -> int:
        """Characters at the end of the text that may be the start of a tag."""
        if self.ended:
            return 0
        most = min(len(tag) - 1, len(self._text) - self._at)
        return next((n for n in range(most, 0, -1) if self._text.endswith(tag[:n])), 0)

    def peek(self) -> Waiting[str]:
        """The next character, not used up; "" at the end."""
        while self._at == len(self._text) and not self.ended:
            yield
        return self._text[self._at : self._at + 1]

    def take(self) -> Waiting[str]:
        """The next character. Raises MalformedError at the end."""
        character = yield from self.peek()
        if not character:
            raise MalformedError
        self._at += 1
        return character

    def expect(self, literal: str) -> Waiting[None]:
        """Use up exactly this text."""
        for character in literal:
            if (yield from self.peek()) != character:
                raise MalformedError
            self._at += 1

    def skip_space(self) -> Waiting[None]:
        while (yield from self.peek()).isspace():
            self._take_run(_SPACE)

    def string(self) -> Waiting[str]:
        """A JSON string, decoded. Raises MalformedError also for one that is not Unicode text."""
        pieces: list[str] = []
        yield from self._string(pieces.append)
        try:
            text: str = json.loads("".join(pieces), strict=False)
            text.encode()
        except (json.JSONDecodeError, UnicodeEncodeError):
            raise MalformedError from None
        return text

    def container(self, say: Callable[[str], object]) -> Waiting[None]:
        """An object or a list, handed on verbatim as it comes; only strings and brackets are looked at."""
        depth = 0
        while True:
            run = self._take_run(_OUTSIDE_STRINGS)
            if run:
                say(run)
            if (yield from self.peek()) == '"':
                yield from self._string(say)
                continue
            bracket = yield from self.take()
            say(bracket)
            if bracket in "{[":
                depth += 1
            elif bracket in "}]":
                depth -= 1
            if depth == 0:
                return

    def value(self, say: Callable[[str], object] = _ignore) -> Waiting[None]:
        """Any JSON value, handed on verbatim."""
        first = yield from self.peek()
        if first and first in "{[":
            yield from self.container(say)
        elif first == '"':
            yield from self._string(say)
        else:
            yield from self._scalar(say)

    def _scalar(self, say: Callable[[str], object]) -> Waiting[None]:
        """A number, true, false or null."""
        pieces: list[str] = []
        while (yield from self.peek()) and (run := self._take_run(_SCALAR)):
            pieces.append(run)
        try:
            json.loads("".join(pieces))
        except ValueError:
            raise MalformedError from None
        say("".join(pieces))

    def _string(self, say: Callable[[str], object]) -> Waiting[None]:
        yield from self.expect('"')
        say('"')
        while True:
            run = self._take_run(_INSIDE_STRING)
            if run:
                say(run)
            character = yield from self.take()
            if character == "\\":
                character += yield from self.take()
            say(character)
            if character == '"':
                return

    def _take_run(self, pattern: re.Pattern[str]) -> str:
        """As much as has arrived of a run of characters, perhaps nothing."""
        found = pattern.match(self._text, self._at)
        assert found is not None, "a run may be empty"
        self._at = found.end()
        return found[0]
