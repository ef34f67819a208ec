"""A tool call as a JSON object, read while it is being written."""

from __future__ import annotations

from collections.abc import Callable

from jaxserve.text.tools.source import MalformedError, TextSource, Waiting

_ARGUMENTS = ("arguments", "parameters")
_CALL_KEYS = frozenset({"name", "type", "id"})


class CallObjectReader:
    """Reads one `{"name": ..., "arguments": {...}}`, the keys in any order, perhaps with others.

    The call is announced as soon as its name is known and its arguments begin, which then go out as they
    come; arguments before the name wait for it.
    """

    def __init__(
        self,
        source: TextSource,
        start: Callable[[str], object],
        say_arguments: Callable[[str], object],
        *,
        tagged: bool,
    ) -> None:
        """tagged: a tag before it has said that this is a call. Without one it must have arguments, and no
        unusual key before them."""
        self._source = source
        self._start = start
        self._say_arguments = say_arguments
        self._tagged = tagged
        self._name: str | None = None
        self._arguments: str | None = None
        """Those that wait for the name, or had to be decoded."""
        self._started = False

    def read(self) -> Waiting[None]:
        """Raises MalformedError; if the call has been announced by then, it stays one."""
        source = self._source
        yield from source.expect("{")
        yield from source.skip_space()
        more = (yield from source.peek()) != "}"
        while more:
            yield from self._member()
            yield from source.skip_space()
            more = (yield from source.peek()) == ","
            if more:
                yield from source.expect(",")
                yield from source.skip_space()
        yield from source.expect("}")
        if not self._started:
            self._say_held("{}" if self._tagged else None)

    def _member(self) -> Waiting[None]:
        """A key, a colon and a value."""
        source = self._source
        key = yield from source.string()
        yield from source.skip_space()
        yield from source.expect(":")
        yield from source.skip_space()
        if self._started:
            yield from source.value()
        elif key == "name" and self._name is None:
            self._name = yield from source.string()
            if self._arguments is not None:
                self._say_held(self._arguments)
        elif key in _ARGUMENTS and self._arguments is None:
            yield from self._take_arguments()
        elif self._tagged or key in _CALL_KEYS:
            yield from source.value()
        else:
            raise MalformedError

    def _take_arguments(self) -> Waiting[None]:
        if self._name and (yield from self._source.peek()) == "{":
            self._started = True
            self._start(self._name)
            yield from self._source.container(self._say_arguments)
            return
        self._arguments = yield from self._decoded_arguments()
        if self._name is not None:
            self._say_held(self._arguments)

    def _decoded_arguments(self) -> Waiting[str]:
        """An object, verbatim; some models write it as a string, or null for none."""
        pieces: list[str] = []
        if (yield from self._source.peek()) == '"':
            pieces.append((yield from self._source.string()))
        else:
            yield from self._source.value(pieces.append)
        text = "".join(pieces).strip()
        if text in ("", "null"):
            return "{}"
        if not text.startswith("{"):
            raise MalformedError
        return text

    def _say_held(self, arguments: str | None) -> None:
        if not self._name or arguments is None:
            raise MalformedError
        self._started = True
        self._start(self._name)
        self._say_arguments(arguments)
