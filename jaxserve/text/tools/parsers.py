"""A parser for each format in which models write tool calls, and for calls that a grammar has forced."""

from __future__ import annotations

import re

from jaxserve.text.tools.parser import ArgumentsDelta, CallStart, ToolCallParser, ToolEvent
from jaxserve.text.tools.source import MalformedError, Waiting

HERMES_TAG = "<tool_call>"
LLAMA3_TAG = "<|python_tag|>"
MISTRAL_TAG = "[TOOL_CALLS]"

_LONGEST_HEADER = 256
_HEADER = re.compile(r"\s*([\w.:/-]+)(?:\[CALL_ID\](\w+))?(?:\[ARGS\])?\s*")


class HermesParser(ToolCallParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen 2.5, Qwen 3."""

    def _read(self) -> Waiting[None]:
        while (yield from self._text_until(HERMES_TAG)):
            if (yield from self._or_text(self._call_object())):
                yield from self._or_text(self._end())

    def _end(self) -> Waiting[None]:
        yield from self._source.skip_space()
        yield from self._source.expect("</tool_call>")


class Llama3Parser(ToolCallParser):
    """`{"name": ..., "parameters": {...}}` that opens the answer or follows `<|python_tag|>`: Llama 3.1 on.

    Further calls may follow, after semicolons or not.
    """

    def _read(self) -> Waiting[None]:
        yield from self._source.skip_space()
        self._say(self._source.since_mark())
        if (yield from self._source.peek()) == "{":
            yield from self._calls(tagged=False)
        while (yield from self._text_until(LLAMA3_TAG)):
            yield from self._calls(tagged=True)

    def _calls(self, *, tagged: bool) -> Waiting[None]:
        more = yield from self._or_text(self._call_object(tagged=tagged))
        while more:
            more = yield from self._or_text(self._next_call())

    def _next_call(self) -> Waiting[None]:
        yield from self._source.skip_space()
        if (yield from self._source.peek()) == ";":
            yield from self._source.expect(";")
        yield from self._call_object(tagged=False)


class MistralParser(ToolCallParser):
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]` and, of newer models, `[TOOL_CALLS]name{...}`,
    where `[ARGS]` may stand before the arguments."""

    def _read(self) -> Waiting[None]:
        while (yield from self._text_until(MISTRAL_TAG)):
            yield from self._or_text(self._calls())

    def _calls(self) -> Waiting[None]:
        yield from self._source.skip_space()
        first = yield from self._source.peek()
        if first == "[":
            yield from self._call_list()
        elif first == "{":
            yield from self._call_object()
        else:
            yield from self._named_call()

    def _named_call(self) -> Waiting[None]:
        header = ""
        while (yield from self._source.peek()) != "{":
            header += yield from self._source.take()
            if len(header) > _LONGEST_HEADER:
                raise MalformedError
        found = _HEADER.fullmatch(header)
        if found is None:
            raise MalformedError
        self._start(found[1], found[2])
        yield from self._source.container(self._say_arguments)


class RequiredParser(ToolCallParser):
    """A list of `{"name": ..., "parameters": {...}}` and nothing else, as `required_schema` has it."""

    def _read(self) -> Waiting[None]:
        yield from self._or_text(self._call_list())


class NamedParser:
    """The arguments of one call, whose function is known beforehand, and nothing else."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._started = False

    def push(self, text: str) -> list[ToolEvent]:
        """See ToolCallParser."""
        if not text:
            return []
        start: list[ToolEvent] = [] if self._started else [CallStart(self._name)]
        self._started = True
        return [*start, ArgumentsDelta(text)]

    def finish(self) -> list[ToolEvent]:
        return []
