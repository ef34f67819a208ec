"""What every parser of tool calls has in common: events out of text, and text where there was no call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import groupby
from typing import NamedTuple, Protocol

from jaxserve.text.tools.call_object import CallObjectReader
from jaxserve.text.tools.source import MalformedError, TextSource, Waiting


class TextDelta(NamedTuple):
    """Text for the reader to see."""

    text: str


class CallStart(NamedTuple):
    """A call of a function begins; the arguments that follow are its own."""

    name: str
    id: str | None = None
    """The model's own name of this call, in the formats that have one."""


class ArgumentsDelta(NamedTuple):
    """The next piece of the call's arguments: JSON, as the model wrote it."""

    text: str


ToolEvent = TextDelta | CallStart | ArgumentsDelta


class Parser(Protocol):
    """One answer's text in, in pieces; text and tool calls out."""

    def push(self, text: str) -> list[ToolEvent]:
        """Take the next piece; return what has become certain."""
        ...

    def finish(self) -> list[ToolEvent]:
        """No text follows; return the rest. Nothing may be pushed afterwards."""
        ...


class ToolCallParser(ABC):
    """A Parser that says what is certain at once.

    However the text is cut, the events are the same but for the pieces that text and arguments come in.
    What begins like a call and is none is text, and nothing of it is lost. A call is announced with the
    start of its arguments; from there on it is one, even if what follows turns out to be no valid JSON: that
    is the client's to see. White space around a call belongs to neither call nor text.
    """

    def __init__(self) -> None:
        self._source = TextSource()
        self._events: list[ToolEvent] = []
        self._space = ""
        """White space that is said with the text that follows it, and dropped if a call follows."""
        self._after_call = False
        self._work = self._read_all()

    def push(self, text: str) -> list[ToolEvent]:
        """Take the next piece; return what has become certain."""
        return self._read_on(text)

    def finish(self) -> list[ToolEvent]:
        """No text follows; return the rest. Nothing may be pushed afterwards."""
        self._source.ended = True
        return self._read_on("")

    @abstractmethod
    def _read(self) -> Waiting[None]:
        """Read the answer; what this leaves is text."""

    def _read_on(self, text: str) -> list[ToolEvent]:
        self._source.extend(text)
        next(self._work, None)
        events, self._events = self._events, []
        return _merged(events)

    def _read_all(self) -> Waiting[None]:
        yield from self._read()
        while not self._source.ended:
            self._say(self._source.rest())
            yield
        self._say(self._source.rest())
        if not self._after_call:
            self._emit_text(self._space)

    def _text_until(self, tag: str) -> Waiting[bool]:
        """Say the text before a tag, and use that up from the mark on; False if there is none to the end."""
        while True:
            before, found = self._source.take_before(tag)
            self._say(before)
            if found or self._source.ended:
                return found
            yield

    def _or_text(self, reader: Waiting[None]) -> Waiting[bool]:
        """Run a reader; where it finds a fault, what it used up since the mark is text, and this is False."""
        try:
            yield from reader
        except MalformedError:
            self._say(self._source.since_mark())
            return False
        self._source.mark()
        return True

    def _call_object(self, *, tagged: bool = True) -> Waiting[None]:
        """Read a call, after white space; see CallObjectReader. Raises MalformedError."""
        yield from self._source.skip_space()
        yield from CallObjectReader(self._source, self._start, self._say_arguments, tagged=tagged).read()

    def _call_list(self) -> Waiting[None]:
        """Read `[` calls `]`. Raises MalformedError; the calls before the fault stay calls."""
        source = self._source
        yield from source.skip_space()
        yield from source.expect("[")
        while True:
            yield from self._call_object()
            source.mark()
            yield from source.skip_space()
            if (yield from source.peek()) != ",":
                break
            yield from source.expect(",")
        yield from source.expect("]")

    def _start(self, name: str, call_id: str | None = None) -> None:
        self._space = ""
        self._after_call = True
        self._events.append(CallStart(name, call_id))
        self._source.mark()

    def _say_arguments(self, text: str) -> None:
        self._events.append(ArgumentsDelta(text))
        self._source.mark()

    def _say(self, text: str) -> None:
        solid = text.rstrip()
        if solid:
            self._emit_text(self._space + solid)
            self._space = ""
            self._after_call = False
        self._space += text[len(solid) :]

    def _emit_text(self, text: str) -> None:
        if text:
            self._events.append(TextDelta(text))


def _merged(events: list[ToolEvent]) -> list[ToolEvent]:
    """The same with the pieces that follow one another in one."""
    merged: list[ToolEvent] = []
    for kind, group in groupby(events, type):
        if kind is CallStart:
            merged.extend(group)
        else:
            merged.append(kind("".join(event.text for event in group if not isinstance(event, CallStart))))
    return merged
