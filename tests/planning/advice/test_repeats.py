"""What prompts have in common, and where they part."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.planning import Trace, TraceRequest, read_trace
from jaxserve.planning.advice import find_repeats, prompt_traffic, read_prompts, split_words, trace_traffic

RULES = " ".join(f"rule {number} says that answers of kind {number} come first" for number in range(30))


@given(st.text())
def test_words_put_together_are_the_text(text: str) -> None:
    assert "".join(split_words(text)) == text


@given(st.lists(st.lists(st.integers(0, 3), max_size=40), min_size=1, max_size=8))
def test_shares_are_shares(prompts: list[list[int]]) -> None:
    if not any(prompts):
        with pytest.raises(ValueError, match="hold nothing"):
            find_repeats(prompts)
        return
    repeats = find_repeats(prompts)
    assert 0.0 <= repeats.prefix_share <= 1.0
    assert 0.0 <= repeats.repeated_share <= 1.0


def test_a_common_beginning_is_a_prefix() -> None:
    traffic = prompt_traffic("log", [f"{RULES} question {number}" for number in range(20)])
    assert traffic.repeats is not None
    assert traffic.repeats.prefix_share > 0.85
    assert traffic.repeats.divergence is None, "nothing goes on alike after the question"


@pytest.mark.parametrize(
    ("beginning", "kind", "position"),
    [
        ("Today is 2026-11-30 10:{:02d}:00. ", "a date or a time", len("Today is 2026-11-30 10:0")),
        ("The session is 3fa85f{:02d}. ", "an identifier", len("The session is 3fa85f0")),
        ("You are number {:02d}. ", "a number", len("You are number 0")),
    ],
)
def test_what_changes_at_the_beginning_is_found_and_named(beginning: str, kind: str, position: int) -> None:
    prompts = [beginning.format(number) + RULES for number in range(10)]
    repeats = prompt_traffic("log", prompts).repeats
    assert repeats is not None
    assert repeats.divergence is not None
    assert repeats.repeated_share > 0.8
    assert repeats.prefix_share < 0.1
    assert (repeats.divergence.position, repeats.divergence.unit) == (position, "character")
    assert repeats.divergence.kind == kind
    assert repeats.divergence.num_prompts == 9
    assert prompts[0][:position].endswith(repeats.divergence.before)


def test_a_name_is_no_number() -> None:
    names = ("Ann", "Bob", "Cyd", "Dan")
    repeats = prompt_traffic("log", [f"Dear {name}. {RULES}" for name in names]).repeats
    assert repeats is not None
    assert repeats.divergence is not None
    assert (repeats.divergence.position, repeats.divergence.kind) == (5, None)
    assert repeats.divergence.before == "Dear "


def test_token_ids_part_at_a_token() -> None:
    common = list(range(100, 200))
    repeats = prompt_traffic("log", [[1, 2, number, *common] for number in range(10)]).repeats
    assert repeats is not None
    assert repeats.divergence is not None
    assert (repeats.divergence.position, repeats.divergence.unit, repeats.divergence.before) == (
        2,
        "token",
        "1 2",
    )


def test_of_several_places_the_commonest_is_shown() -> None:
    early = [f"{number} {RULES}" for number in range(3)]
    late = [f"Welcome back, customer {number}. {RULES[::-1]}" for number in range(7)]
    repeats = prompt_traffic("log", [*early, *late]).repeats
    assert repeats is not None
    assert repeats.divergence is not None
    assert repeats.divergence.before == "Welcome back, customer "
    assert repeats.divergence.num_prompts == 6


def request(arrival: float, *hashes: int, output: int = 10) -> TraceRequest:
    return TraceRequest(
        arrival=arrival, prompt_tokens=512 * len(hashes) or 7, output_tokens=output, prefix_hashes=hashes
    )


def test_blocks_of_a_trace_part_at_a_token_too() -> None:
    requests = tuple(request(float(n), 5, 100 + n, 7, 8, 9) for n in range(10))
    repeats = trace_traffic(Trace("t", requests)).repeats
    assert repeats is not None
    assert repeats.prefix_share == pytest.approx(9 / 50)
    assert repeats.repeated_share == pytest.approx(36 / 50)
    assert repeats.divergence is not None
    assert (repeats.divergence.position, repeats.divergence.num_prompts) == (512, 9)


def test_a_trace_says_how_requests_come() -> None:
    requests = tuple(request(at, output=n) for at, n in ((0.0, 10), (0.5, 10), (3.0, 10), (4.0, 200)))
    traffic = trace_traffic(Trace("t", requests))
    assert traffic.repeats is None
    assert traffic.together_share == 0.5
    assert traffic.longest == 207
    assert traffic.answers is not None
    assert (traffic.answers.p50, traffic.answers.mean) == (10.0, 57.5)


def test_conversations_turns_and_bodies_are_prompts(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    lines = [
        {"prompt": "a text"},
        {"prompt": [1, 2]},
        {"question": "asked"},
        {"turns": ["first", "second"]},
        {"messages": messages},
        {"custom_id": "1", "body": {"messages": parts}},
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    assert read_prompts(path) == [
        *("a text", [1, 2], "asked", "first"),
        *("[system]Be brief.\n[user]Why?", "[user]ab"),
    ]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{"prompt": "a"}\n{"prompt": 3}\n', "line 2: no prompt"),
        ('{"prompt": "a"}\n{"prompt"\n', "line 2: "),
        ('{"messages": "hello"}\n', "line 1: messages is 'hello'"),
        ("\n", "holds no prompt"),
    ],
)
def test_a_line_without_prompt_is_named(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=complaint):
        read_prompts(path)


def test_real_prompts_with_a_time_in_front_part_there(shared_data: Path) -> None:
    asked = read_prompts(shared_data / "prompts" / "gsm8k" / "test.jsonl")
    plain = prompt_traffic("plain", asked).repeats
    assert plain is not None
    assert max(plain.prefix_share, plain.repeated_share) < 0.05
    stamped = [f"It is 10:{n // 60:02d}:{n % 60:02d}. {RULES}\n{text}" for n, text in enumerate(asked)]
    repeats = prompt_traffic("stamped", stamped).repeats
    assert repeats is not None
    assert repeats.divergence is not None
    assert repeats.repeated_share - repeats.prefix_share > 0.6
    assert repeats.divergence.kind == "a date or a time"


def test_a_real_trace_shares_beginnings_and_does_not_part(shared_data: Path) -> None:
    trace = read_trace(shared_data / "traces" / "mooncake" / "conversation_trace.jsonl")
    repeats = trace_traffic(trace).repeats
    assert repeats is not None
    assert repeats.prefix_share == trace.ideal_reuse > 0.3
    assert repeats.divergence is None
