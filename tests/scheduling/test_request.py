"""A request's life: the transition table, and the ends that token ids and counts bring."""

from __future__ import annotations

import itertools

import pytest

from jaxserve.plan import SamplingParams
from jaxserve.scheduling import Request, RequestState, Scheduler
from tests.fake_limits import make_limits

STATES = list(RequestState)
LEGAL = {
    ("waiting", "running"),
    ("waiting", "aborted"),
    ("waiting", "expired"),
    ("waiting", "failed"),
    ("running", "preempted"),
    ("running", "stopped"),
    ("running", "exhausted"),
    ("running", "aborted"),
    ("running", "expired"),
    ("running", "failed"),
    ("preempted", "running"),
    ("preempted", "stopped"),
    ("preempted", "exhausted"),
    ("preempted", "aborted"),
    ("preempted", "expired"),
    ("preempted", "failed"),
}


def request(**params: object) -> Request:
    scheduler = Scheduler(make_limits(eos_token_ids=(2,)))
    return scheduler.submit("a", [1, 2, 3], SamplingParams(**params), 0).leader  # type: ignore[arg-type]


@pytest.mark.parametrize(("old", "new"), list(itertools.product(STATES, STATES)))
def test_only_legal_transitions_are_made(old: RequestState, new: RequestState) -> None:
    subject = request()
    subject.state = old
    if (old.value, new.value) in LEGAL:
        subject.advance(new)
        assert subject.state is new
    else:
        with pytest.raises(RuntimeError, match=f"sample 0 cannot go from {old.value} to {new.value}"):
            subject.advance(new)
        assert subject.state is old


def test_each_end_has_its_finish_reason() -> None:
    reasons = {}
    for state in STATES:
        if ("running", state.value) in LEGAL and state is not RequestState.PREEMPTED:
            subject = request()
            subject.advance(RequestState.RUNNING)
            assert subject.finish_reason is None
            subject.advance(state)
            reasons[state.value] = subject.finish_reason
    assert reasons == {
        "stopped": "stop",
        "exhausted": "length",
        "aborted": "abort",
        "expired": "expired",
        "failed": "error",
    }


@pytest.mark.parametrize(
    ("params", "tokens", "end", "stop_reason"),
    [
        ({"max_tokens": 3}, [5, 6, 7], "exhausted", None),
        ({"max_tokens": 3}, [5, 2], "stopped", None),
        ({"max_tokens": 3, "ignore_eos": True}, [5, 2, 2], "exhausted", None),
        ({"max_tokens": 3, "stop_token_ids": [6]}, [5, 6], "stopped", 6),
        ({"max_tokens": 2, "stop_token_ids": [6]}, [5, 6], "stopped", 6),
        ({"max_tokens": 3, "stop_token_ids": [2]}, [2], "stopped", None),
        ({"max_tokens": 3, "stop_token_ids": [2], "ignore_eos": True}, [2], "stopped", 2),
        ({"max_tokens": 4, "min_tokens": 3, "stop_token_ids": [6]}, [6, 2, 6], "stopped", 6),
    ],
)
def test_tokens_end_an_answer(
    params: dict[str, object], tokens: list[int], end: str, stop_reason: int | None
) -> None:
    subject = request(**params)
    ends = [subject.append(token) for token in tokens]
    assert ends[:-1] == [None] * (len(tokens) - 1)
    assert ends[-1] is RequestState(end)
    assert subject.stop_reason == stop_reason
    assert subject.output == tokens
