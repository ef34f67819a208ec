"""Deltas on their way: joined for a slow reader, framed as events, given up when a wait is too long."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

pytest.importorskip("starlette", reason="needs the server extra")

from jaxserve.outputs import AnswerDelta, Logprob
from server.http.answers import AnswerFormat, Identity
from server.http.chat import ChatAnswer, read_chat
from server.http.completions import CompletionAnswer, read_completion
from server.http.events import EventWriter
from server.http.requests import Call
from server.http.streams import Patience, joined
from server.http.tool_speech import ToolSpeech
from tests.fake_model import byte_tokenizer


def delta(index: int, token: int, text: str, *, end: bool = False) -> AnswerDelta:
    logprobs = [{token: Logprob(-float(token), 1)}]
    return AnswerDelta("r", index, (token,), text, logprobs, "stop" if end else None, token if end else None)


def test_deltas_of_a_sample_become_one() -> None:
    parts = [delta(1, 5, "a"), delta(0, 6, "b"), delta(1, 7, ""), delta(1, 8, "c", end=True)]
    one, zero = joined(parts)
    assert zero is parts[1]
    assert (one.index, one.token_ids, one.text) == (1, (5, 7, 8), "ac")
    assert one.logprobs == [{token: Logprob(-float(token), 1)} for token in (5, 7, 8)]
    assert (one.finish_reason, one.stop_reason) == ("stop", 8)


def test_a_lone_delta_stays_as_it_is() -> None:
    parts = [delta(0, 1, "x")]
    assert joined(parts) is parts


def frames(call: Call, answer: AnswerFormat, deltas: list[AnswerDelta]) -> list[tuple[Any, Any]]:
    """Each delta's event as the writer writes it, and as its chunk says."""
    writer = EventWriter(answer, include_usage=call.stream.include_usage)
    return [(json.loads(writer.delta(0, d).removeprefix(b"data: ")), answer.chunk(0, d)) for d in deltas]


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_a_text_in_its_frame_is_the_chunk_of_its_delta(kind: str, usage: bool) -> None:
    texts = ["plain", ' "quoted" \\ \n\t', "ünï\u2028 \U0001f600", "\ue000text\ue000", "</script>\x00"]
    deltas = [AnswerDelta("r", index, (5,), text, None, None, None) for text in texts for index in (0, 1)]
    deltas.append(deltas[0]._replace(finish_reason="length"))
    body = {"n": 2, "stream": True, "stream_options": {"include_usage": usage}}
    identity, tokenizer = Identity("id-1", "a model"), byte_tokenizer()
    if kind == "chat":
        call = read_chat(body | {"messages": [{"role": "user", "content": "x"}]})
        answer: AnswerFormat = ChatAnswer(call, identity, tokenizer, ToolSpeech("auto"))
    else:
        call = read_completion(body | {"prompt": "x"})
        answer = CompletionAnswer(call, identity, tokenizer)
    assert answer.plain
    expected_usage = {"usage": None} if usage else {}
    for written, chunk in frames(call, answer, deltas):
        assert chunk is not None
        assert written == chunk | expected_usage


def test_answers_that_show_token_ids_have_no_frames() -> None:
    call = read_completion({"prompt": "x", "stream": True, "return_token_ids": True})
    answer = CompletionAnswer(call, Identity("id-1", "a model"), byte_tokenizer())
    for written, chunk in frames(call, answer, [AnswerDelta("r", 0, (5, 6), "ab", None, None, None)]):
        assert written == json.loads(json.dumps(chunk))
        assert written["choices"][0]["token_ids"] == [5, 6]


@pytest.mark.alone
def test_patience_ends_one_long_wait_and_not_many_short_ones() -> None:
    async def wait(seconds: float, times: int) -> None:
        async with Patience(0.1) as patience:
            for _ in range(times):
                patience.begin()
                await asyncio.sleep(seconds)
                patience.end()

    async def main() -> None:
        await wait(0.02, 10)
        start = time.monotonic()
        with pytest.raises(TimeoutError):
            await wait(5.0, 1)
        assert time.monotonic() - start < 2.0

    asyncio.run(main())
