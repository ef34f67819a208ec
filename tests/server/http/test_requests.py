"""Requests that no well-behaved client sends, and addresses that the official one does not know."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("starlette", reason="needs the server extra")
httpx = pytest.importorskip("httpx", reason="needs an HTTP client")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from server.http.options import HttpOptions  # noqa: E402
from tests.fake_engine import FakeEngine  # noqa: E402
from tests.fake_model import fake_limits  # noqa: E402
from tests.server.harness import GREEDY, TOKENIZER, expected  # noqa: E402
from tests.server.http.running import HttpServer, http_server  # noqa: E402

MAX_BODY = 10_000
LIMITS = fake_limits(max_model_len=48)
VALID = {
    "model": "fake",
    "prompt": "one",
    "temperature": 0,
    "max_tokens": 12,
    "ignore_eos": True,
    "return_token_ids": True,
}


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    with http_server(FakeEngine(LIMITS), HttpOptions(max_body_bytes=MAX_BODY, body_seconds=0.3)) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: HttpServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=20) as made:
        yield made


def assert_refused(answer: httpx.Response, status: int, message: str) -> dict[str, Any]:
    """Check that this is an error in OpenAI's shape; return it."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert message in error["message"]
    return error


def post(client: httpx.Client, body: bytes, kind: str = "application/json") -> httpx.Response:
    return client.post("/v1/completions", content=body, headers={"content-type": kind})


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[]", "expected an object"),
        (b'"text"', "expected an object"),
        (b"\xff\xfe{}", "not valid UTF-8"),
        (b'{"temperature": NaN}', "NaN is not JSON"),
        (b'{"prompt": "\\ud800"}', "unpaired surrogate"),
        (b'{"max_tokens": ' + b"9" * 5000 + b"}", "not acceptable JSON"),
        (b'{"prompt": ' + b"[" * 40 + b"]" * 40 + b"}", "nested too deeply"),
        (b"[" * 4000, "nested too deeply"),
        (b'{"prompt": "x", "temperature": 1e999}', "temperature inf is out of range"),
        (b'{"prompt": "x", "temperature": 1' + b"0" * 400 + b"}", "temperature is out of range"),
        (b'{"prompt": "x", "seed": 1' + b"0" * 40 + b"}", "it must fit 64 bits"),
        (b'{"prompt": "x", "n": true}', "n is True; expected a whole number"),
        (b'{"prompt": "x", "stream": 1}', "expected true or false"),
        (b'{"prompt": "x", "stop": [""]}', "stop holds an empty string"),
        (b'{"prompt": {}}', "expected a text, token ids"),
        (b'{"prompt": []}', "expected a text, token ids"),
        (b'{"prompt": [1, "x"]}', "expected a text, token ids"),
        (b'{"prompt": [-1]}', "expected a text, token ids"),
        (b'{"prompt": [257, 258]}', "258"),
        (b'{"prompt": ["a", "b"], "n": 1000}', "the limit is 1024 in all"),
        (b"{}", "prompt is None"),
    ],
)
def test_a_malformed_body_is_a_400(client: httpx.Client, body: bytes, message: str) -> None:
    assert_refused(post(client, body), 400, message)


def test_other_content_types_are_a_415(client: httpx.Client) -> None:
    assert_refused(post(client, b"{}", "text/plain"), 415, "expected application/json")
    assert_refused(client.post("/v1/completions"), 415, "expected application/json")
    assert post(client, json.dumps(VALID).encode(), "application/json; charset=utf-8").status_code == 200


def test_a_body_beyond_the_limit_is_a_413(client: httpx.Client) -> None:
    def parts() -> Iterator[bytes]:
        yield from [b" " * 1000] * 11

    assert_refused(post(client, b" " * (MAX_BODY + 1)), 413, "10000 bytes")
    chunked = client.post("/v1/completions", content=parts(), headers={"content-type": "application/json"})
    assert_refused(chunked, 413, "10000 bytes")
    assert_refused(post(client, b" " * MAX_BODY), 400, "not valid JSON")


def test_a_body_that_does_not_come_is_a_408(client: httpx.Client) -> None:
    headers = {"content-type": "application/json", "content-length": "100"}

    def parts() -> Iterator[bytes]:
        yield b"{"
        time.sleep(0.5)
        yield b" " * 99

    assert_refused(client.post("/v1/completions", content=parts(), headers=headers), 408, "0.3 seconds")


def test_wrong_addresses_and_methods(client: httpx.Client) -> None:
    assert_refused(client.get("/v1/nowhere"), 404, "/v1/nowhere")
    answer = client.get("/v1/completions")
    assert_refused(answer, 405, "Method Not Allowed")
    assert answer.headers["allow"] == "POST"


def test_tokenize_and_back(client: httpx.Client) -> None:
    answer = client.post("/tokenize", json={"prompt": "héllo", "return_token_strs": True}).json()
    assert answer["tokens"] == TOKENIZER.encode("héllo")
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == LIMITS.max_model_len
    assert answer["token_strs"][:2] == ["<s>", "h"]
    back = client.post("/detokenize", json={"tokens": answer["tokens"][1:]})
    assert back.json() == {"prompt": "héllo"}
    bare = client.post("/tokenize", json={"prompt": "héllo", "add_special_tokens": False}).json()
    assert bare["tokens"] == answer["tokens"][1:]
    messages = [{"role": "user", "content": "hi"}]
    chat = client.post("/tokenize", json={"messages": messages, "add_generation_prompt": False}).json()
    assert chat["tokens"] == TOKENIZER.apply_chat_template(messages, add_generation_prompt=False)


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/tokenize", {}, 400, "one of prompt"),
        ("/tokenize", {"prompt": 1}, 400, "expected a string"),
        ("/tokenize", {"prompt": "x", "model": "other"}, 404, "not served"),
        ("/tokenize", {"prompt": "x", "odd": 1}, 400, "unknown parameter"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": ["x"]}, 400, "expected a list of token ids"),
        ("/detokenize", {"tokens": [258]}, 400, "258"),
    ],
)
def test_tokenize_refusals(
    client: httpx.Client, path: str, body: dict[str, Any], status: int, message: str
) -> None:
    assert_refused(client.post(path, json=body), status, message)


def test_a_stream_on_the_wire(client: httpx.Client) -> None:
    answer = client.post("/v1/completions", json=VALID | {"stream": True})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == expected(
        "one", GREEDY
    )
    assert "usage" not in chunks[0]


_NAMES = (
    "model prompt messages n stream stream_options temperature top_p top_k min_p seed stop logprobs "
    "top_logprobs echo logit_bias max_tokens min_tokens tools stop_token_ids allowed_token_ids "
    "bad_token_ids prompt_logprobs response_format user repetition_penalty presence_penalty "
    "ignore_eos metadata chat_template_kwargs tokens odd tool_choice parallel_tool_calls "
    "structured_outputs guided_json guided_regex guided_choice"
)
_KEYS = st.text(max_size=5) | st.sampled_from(
    ["role", "content", "1", "type", "text", "include_usage", "tool_calls", "function", "name", "json"]
)
_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 5),
    st.sampled_from([2**31, 2**63, -(2**64), 10**50, 257, 258]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=5),
)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=3),
    max_leaves=6,
)
_BASES = {
    "/v1/completions": VALID,
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9, "stream": True},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [5]},
}
_CHANGES = st.dictionaries(st.sampled_from(_NAMES.split()), _VALUES, max_size=2)
PATHS = st.sampled_from([*_BASES, "/v1/completions", "/v1/chat/completions"])
CUTS = st.sampled_from([0, 1, 20, 50] + 6 * [None])
"""Most bodies are whole."""


@settings(max_examples=500, deadline=None, derandomize=True, database=None)
@given(path=PATHS, changes=_CHANGES, cut=CUTS)
def test_no_body_breaks_the_server(
    client: httpx.Client, path: str, changes: dict[str, Any], cut: int | None
) -> None:
    check_answer(client, path, json.dumps(_BASES[path] | changes).encode()[:cut])


@settings(max_examples=50, deadline=None, derandomize=True, database=None)
@given(path=PATHS, body=st.binary(max_size=40))
def test_no_bytes_break_the_server(client: httpx.Client, path: str, body: bytes) -> None:
    check_answer(client, path, body)


def check_answer(client: httpx.Client, path: str, body: bytes) -> None:
    """Whatever was asked, the answer is whole, or an error in the client's words."""
    answer = client.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code in (200, 400, 404), answer.text
    if answer.status_code != 200:
        assert answer.json()["error"]["message"]
    elif answer.headers["content-type"].startswith("text/event-stream"):
        assert answer.text.endswith("data: [DONE]\n\n")
        assert '"error"' not in answer.text


def test_after_all_that_a_valid_request_is_answered(server: HttpServer, client: httpx.Client) -> None:
    """The harness checks pages and slots when the server stops."""
    answer = client.post("/v1/completions", json=VALID)
    assert answer.json()["choices"][0]["token_ids"] == expected("one", GREEDY)
    server.wait_until_idle()
