"""The words of one sample as a chat shows them: content, and tool calls where there may be any."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from jaxserve.text.tools import ArgumentsDelta, CallStart, Parser, TextDelta, ToolEvent
from server.http.answers import Json


class Speech(Protocol):
    """Turns one sample's text, in pieces, into what the API calls a message."""

    def delta(self, text: str, *, ended: bool) -> Json:
        """What a piece adds to the message; nothing, if nothing is certain yet. `ended`: no piece follows."""
        ...

    def finish_reason(self, reason: str | None) -> str | None:
        """How the sample ended, given how its text did."""
        ...


class PlainSpeech:
    """All of it is content."""

    def delta(self, text: str, *, ended: bool) -> Json:
        return {"content": text} if text else {}

    def finish_reason(self, reason: str | None) -> str | None:
        return reason


class CallingSpeech:
    """Content and tool calls, as a parser tells them apart."""

    def __init__(self, parser: Parser, new_id: Callable[[], str], *, parallel: bool) -> None:
        """parallel: whether calls after the first one count."""
        self._parser = parser
        self._new_id = new_id
        self._parallel = parallel
        self._num_calls = 0

    def delta(self, text: str, *, ended: bool) -> Json:
        events = self._parser.push(text)
        if ended:
            events += self._parser.finish()
        said: Json = {}
        if content := "".join(event.text for event in events if isinstance(event, TextDelta)):
            said["content"] = content
        if calls := self._calls(events):
            said["tool_calls"] = calls
        return said

    def finish_reason(self, reason: str | None) -> str | None:
        return "tool_calls" if reason == "stop" and self._num_calls else reason

    def _calls(self, events: Iterable[ToolEvent]) -> list[Json]:
        """One entry for each call that something was added to, with its id and name where it begins."""
        entries: dict[int, Json] = {}
        for event in events:
            if isinstance(event, CallStart):
                entries[self._num_calls] = self._opening(event)
                self._num_calls += 1
            elif isinstance(event, ArgumentsDelta):
                index = self._num_calls - 1
                entry = entries.setdefault(index, {"index": index, "function": {"arguments": ""}})
                entry["function"]["arguments"] += event.text
        return [entry for index, entry in entries.items() if self._parallel or index == 0]

    def _opening(self, start: CallStart) -> Json:
        return {
            "index": self._num_calls,
            "id": start.id or self._new_id(),
            "type": "function",
            "function": {"name": start.name, "arguments": ""},
        }


def whole_message(speech: Speech, text: str) -> Json:
    """The message of a sample that has ended."""
    said = speech.delta(text, ended=True)
    calls = said.get("tool_calls", [])
    message = {
        "role": "assistant",
        "content": said.get("content", None if calls else ""),
        "refusal": None,
    }
    if calls:
        message["tool_calls"] = [
            {key: value for key, value in call.items() if key != "index"} for call in calls
        ]
    return message
