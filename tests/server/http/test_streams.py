"""What a slow reader gets: deltas joined, sample by sample."""

from __future__ import annotations

import pytest

pytest.importorskip("starlette", reason="needs the server extra")

from jaxserve.outputs import AnswerDelta, Logprob
from server.http.streams import joined


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
