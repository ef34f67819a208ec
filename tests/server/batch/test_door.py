"""A batch says what the HTTP door would have said to the same body."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="needs the server extra")
httpx = pytest.importorskip("httpx", reason="needs an HTTP client")

from tests.fake_engine import FakeEngine  # noqa: E402
from tests.fake_model import fake_limits  # noqa: E402
from tests.server.batch.conftest import (  # noqa: E402
    Json,
    by_name,
    chat,
    comparable,
    completion,
    run_over,
    write_lines,
)
from tests.server.http.running import http_server  # noqa: E402

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["yes", "no"]}}}
BODIES: list[Json] = [
    completion("plain", logprobs=2, echo=True),
    completion("texts", ["one", "two"], n=2, stop=["a", "e"], max_tokens=40),
    completion("ids", [5, 6, 7], prompt_logprobs=1),
    completion("sampled", temperature=0.7, seed=3, n=3, min_tokens=2),
    completion("biased", logit_bias={"40": 3}, allowed_token_ids=[40, 41], frequency_penalty=0.5),
    completion("form", guided_regex="[ab]{3}", ignore_eos=False),
    chat("chat", logprobs=True, top_logprobs=1),
    chat("schema", response_format=FORM, ignore_eos=False, max_tokens=60),
    chat("tools", tools=[TOOL], tool_choice="required", ignore_eos=False, max_tokens=60),
    chat("auto", tools=[TOOL]),
    chat("salted", cache_salt="mine", priority="batch"),
    chat("full", "x" * 60, max_tokens=None, min_tokens=100),
    chat("bad role", messages=[{"content": "x"}]),
    chat("bad form", response_format={"type": "nonesuch"}),
    chat("bad schema", response_format=FORM | {"json_schema": {"schema": {"type": "nonesuch"}}}),
    chat("bad tools", tools=[TOOL, TOOL]),
    chat("too long", "x" * 130),
    completion("bad seed", seed=2**63),
    completion("bad grammar", guided_grammar="root ::= nonesuch"),
    completion("bad model", model="nonesuch"),
    completion("bad class", priority="nonesuch"),
    completion("unknown", nonesuch=1),
]


def test_answers_and_errors_are_the_doors(tmp_path: Path) -> None:
    pytest.importorskip("llguidance", reason="needs the server extra")
    batch = write_lines(tmp_path / "in.jsonl", BODIES)
    run_over(batch, tmp_path / "out.jsonl")
    records = by_name(tmp_path / "out.jsonl")
    with http_server(FakeEngine(fake_limits())) as server, httpx.Client(base_url=server.url) as client:
        for line in BODIES:
            answer = client.post(line["url"], json=line["body"], timeout=30)
            record = comparable(records[line["custom_id"]])
            door = {"status_code": answer.status_code, "request_id": "", "body": answer.json()}
            assert record["response"] == comparable(record | {"response": door})["response"], line[
                "custom_id"
            ]
    statuses = [records[line["custom_id"]]["response"]["status_code"] for line in BODIES]
    assert statuses == [200] * 12 + [400] * 7 + [404, 400, 400]
