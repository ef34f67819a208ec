"""Traces on disk: the three formats are told by their content, and a bad line is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxserve.planning import Trace, TraceRequest, read_trace, write_trace

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 23:59:59.5000000,374,44
2023-11-17 00:00:01.2500000,8,1
"""
MOONCAKE = '{"timestamp": 1500, "input_length": 600, "output_length": 5, "hash_ids": [0, 7]}\n'


def written(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text)
    return path


def test_azure_times_count_from_the_first_request(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, AZURE))
    assert [(r.arrival, r.prompt_tokens, r.output_tokens) for r in trace.requests] == [
        (0.0, 374, 44),
        (1.75, 8, 1),
    ]


def test_mooncake_times_are_milliseconds(tmp_path: Path) -> None:
    (request,) = read_trace(written(tmp_path, MOONCAKE)).requests
    assert request == TraceRequest(arrival=1.5, prompt_tokens=600, output_tokens=5, prefix_hashes=(0, 7))


def test_our_own_format_comes_back_as_it_was(tmp_path: Path) -> None:
    trace = Trace(
        "trace",
        (
            TraceRequest(arrival=0.25, prompt_tokens=3, output_tokens=2),
            TraceRequest(
                arrival=1.0,
                prompt_tokens=513,
                output_tokens=9,
                prefix_hashes=(5, 6),
                tenant="a",
                priority="batch",
            ),
        ),
    )
    path = tmp_path / "trace.jsonl"
    write_trace(trace, path)
    assert read_trace(path) == trace


def test_requests_are_put_in_the_order_of_arrival(tmp_path: Path) -> None:
    lines = [{"arrival": arrival, "prompt_tokens": 1, "output_tokens": 1} for arrival in (3.0, 1.0, 2.0)]
    trace = read_trace(written(tmp_path, "\n".join(map(json.dumps, lines))))
    assert [request.arrival for request in trace.requests] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", r"line 1: not a trace"),
        ("hello\n", r"line 1: not a trace"),
        ("[1, 2]\n", r"line 1: not a trace"),
        ('{"when": 1}\n', r"line 1: not a trace"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", r"holds no request"),
        (AZURE + "yesterday,1,1\n", r"line 4: TIMESTAMP 'yesterday' is not a date"),
        (AZURE + "2023-11-17 00:00:02,many,1\n", r"line 4: ContextTokens 'many' is not a whole number"),
        (AZURE + "2023-11-17 00:00:02,5\n", r"line 4: GeneratedTokens is missing"),
        (AZURE + "2023-11-17 00:00:02,5,0\n", r"line 4: output_tokens 0 is below 1"),
        (MOONCAKE + "{oops\n", r"line 2: not JSON"),
        (MOONCAKE + "[]\n", r"line 2: list instead of a JSON object"),
        (
            MOONCAKE.replace("600", "1600"),
            r"line 1: prefix_hashes has 2 entries; 1600 prompt tokens are 4 blocks",
        ),
        (MOONCAKE.replace("[0, 7]", '[0, "7"]'), r"line 1: hash_ids is not a list of whole numbers"),
        (MOONCAKE.replace("1500", "-1500"), r"line 1: arrival -1.5 is not a number of seconds"),
        (MOONCAKE.replace("1500", "true"), r"line 1: timestamp True is not a number"),
        (
            '{"arrival": 0, "prompt_tokens": 1, "output_tokens": 1, "tennant": "a"}',
            r"unknown field 'tennant'",
        ),
        ('{"arrival": 0, "prompt_tokens": 1, "output_tokens": 1, "tenant": 5}', r"tenant 5 is not a text"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, text: str, complaint: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ValueError, match=complaint) as error:
        read_trace(path)
    assert str(error.value).startswith(str(path))


def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(ValueError, match="is not a text in UTF-8"):
        read_trace(path)


def test_the_azure_chat_trace(shared_data: Path) -> None:
    trace = read_trace(shared_data / "traces" / "azure2023" / "AzureLLMInferenceTrace_conv.csv")
    assert len(trace) == 19366
    assert trace.seconds == pytest.approx(3501.721937)
    assert sum(request.prompt_tokens for request in trace.requests) == 22361870
    assert max(request.output_tokens for request in trace.requests) == 1000


def test_the_mooncake_trace(shared_data: Path) -> None:
    trace = read_trace(shared_data / "traces" / "mooncake" / "conversation_trace.jsonl")
    assert len(trace) == 12031
    assert trace.seconds == pytest.approx(3536.999)
    assert trace.requests[0].prefix_hashes == tuple(range(14))
    assert trace.ideal_reuse == pytest.approx(0.37362, abs=1e-5)
