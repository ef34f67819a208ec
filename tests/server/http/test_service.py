"""The door as a part of a service: load, shutdown, failures, lazy and vanishing clients, tenants."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("starlette", reason="needs the server extra")
httpx = pytest.importorskip("httpx", reason="needs an HTTP client")


from server.core import Status  # noqa: E402
from server.http.options import HttpOptions  # noqa: E402
from tests.fake_engine import FakeEngine  # noqa: E402
from tests.fake_model import fake_limits  # noqa: E402
from tests.server.harness import ENDLESS, GREEDY, PacedEngine, expected  # noqa: E402
from tests.server.http.running import HttpServer, http_server  # noqa: E402

SHORT = {"prompt": "one", "temperature": 0, "max_tokens": 12, "ignore_eos": True, "return_token_ids": True}
LONG = SHORT | {"max_tokens": ENDLESS.max_tokens}
WIDE = LONG | {"n": 4, "logprobs": 5, "stream": True}
"""More bytes than the buffers between server and client hold."""


class SlowEngine(PacedEngine):
    pace = 0.02


@contextmanager
def read_lazily(server: HttpServer, body: dict[str, Any]) -> Iterator[httpx.Response]:
    """A response of which nothing has been read but its head, over a connection that buffers little."""
    transport = httpx.HTTPTransport(socket_options=[(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)])
    with (
        httpx.Client(transport=transport, timeout=20) as client,
        client.stream("POST", f"{server.url}/v1/completions", json=body) as answer,
    ):
        yield answer


def post_aside(server: HttpServer, body: dict[str, Any]) -> threading.Thread:
    """Ask for a completion on another thread, and do not care for the answer."""
    thread = threading.Thread(target=httpx.post, args=[f"{server.url}/v1/completions"], kwargs={"json": body})
    thread.start()
    return thread


def events(text: str) -> list[dict[str, Any]]:
    parts = text.split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_frees_its_request(stream: bool) -> None:
    with http_server(SlowEngine(fake_limits())) as server:
        body = json.dumps(LONG | {"stream": stream}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + body)
            server.wait_until(lambda: server.service.load().num_running == 1)
        server.wait_until_idle()
        assert server.service.statistics.num_failed == {Status.CANCELLED: 1}
        assert server.service.engine.snapshot().num_sampled < ENDLESS.max_tokens


def test_a_slow_reader_stalls_nobody_and_misses_nothing() -> None:
    with http_server() as server, read_lazily(server, WIDE) as answer:
        server.wait_until_idle()
        quick = httpx.post(f"{server.url}/v1/completions", json=SHORT)
        assert quick.json()["choices"][0]["token_ids"] == expected("one", GREEDY)
        chunks = events(answer.read().decode())
    tokens: list[list[int]] = [[], [], [], []]
    for chunk in chunks:
        for choice in chunk["choices"]:
            tokens[choice["index"]] += choice["token_ids"]
    assert tokens == [expected("one", ENDLESS)] * 4
    assert len(chunks) < 4 * ENDLESS.max_tokens, "what waited for the reader is sent together"


def test_a_reader_that_takes_nothing_is_given_up() -> None:
    options = HttpOptions(stall_seconds=0.2)
    with http_server(SlowEngine(fake_limits()), options) as server, read_lazily(server, WIDE):
        server.wait_until(lambda: server.service.statistics.num_failed[Status.CANCELLED] == 1)
        server.wait_until_idle()


def test_too_much_waiting_is_a_429_with_a_time() -> None:
    with http_server(SlowEngine(fake_limits(num_slots=1)), max_waiting=0) as server:
        running = threading.Thread(
            target=httpx.post, args=(f"{server.url}/v1/completions",), kwargs={"json": SHORT}
        )
        running.start()
        server.wait_until(lambda: server.service.engine.num_open == 1)
        refused = httpx.post(f"{server.url}/v1/completions", json=SHORT)
        running.join()
        assert refused.status_code == 429
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert int(refused.headers["retry-after"]) >= 1
        assert server.service.statistics.num_rejected == {"queue_full": 1}


def test_all_prompts_of_a_call_are_admitted_or_none() -> None:
    with http_server(SlowEngine(fake_limits(num_slots=1)), max_waiting=1) as server:
        refused = httpx.post(f"{server.url}/v1/completions", json=SHORT | {"prompt": ["one", "two", "three"]})
        assert refused.status_code == 429
        server.wait_until_idle()


def test_draining_lets_streams_finish_and_takes_no_more() -> None:
    with http_server(SlowEngine(fake_limits())) as server, httpx.Client(base_url=server.url) as client:
        assert client.get("/ready").status_code == 200
        with client.stream("POST", "/v1/completions", json=SHORT | {"stream": True}) as answer:
            server.do(server.service.start_draining)
            server.wait_until(lambda: server.service.draining)
            refused = httpx.post(f"{server.url}/v1/completions", json=SHORT)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "unavailable"
            assert int(refused.headers["retry-after"]) >= 1
            assert httpx.get(f"{server.url}/ready").status_code == 503
            assert httpx.get(f"{server.url}/health").status_code == 200
            chunks = events(answer.read().decode())
    assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == expected(
        "one", GREEDY
    )


def test_a_failure_of_the_engine_ends_streams_with_an_error_and_no_traceback() -> None:
    device = FakeEngine(fake_limits(), fail_at=5, error=RuntimeError("secret detail"))
    with http_server(device) as server, httpx.Client(base_url=server.url) as client:
        streamed = client.post("/v1/completions", json=SHORT | {"prompt": ["one", "two"], "stream": True})
        *_, last = events(streamed.text)
        assert last["error"]["type"] == "server_error"
        after = client.post("/v1/completions", json=SHORT)
        assert after.status_code == 500
        assert after.json()["error"]["code"] == "internal"
        assert client.get("/health").status_code == 503
        assert client.get("/ready").status_code == 503
        for text in (streamed.text, after.text):
            assert "secret" not in text
            assert "Traceback" not in text


def test_bearer_tokens_stand_for_tenants() -> None:
    options = HttpOptions(tokens={"key-a": "a", "key-b": "b"})
    with http_server(options=options) as server, httpx.Client(base_url=server.url) as client:
        tenants: list[str] = []
        server.service.observers.append(lambda record: tenants.append(record.request.tenant))
        for wrong in ({}, {"authorization": "Bearer key-c"}, {"authorization": "Basic key-a"}):
            refused = client.post("/v1/completions", json=SHORT, headers=wrong)
            assert refused.status_code == 401
            assert refused.headers["www-authenticate"] == "Bearer"
            assert refused.json()["error"]["type"] == "authentication_error"
        for key in ("key-b", "key-a"):
            answered = client.post("/v1/completions", json=SHORT, headers={"authorization": f"Bearer {key}"})
            assert answered.status_code == 200
        assert tenants == ["b", "a"]
        for path in ("/health", "/ready", "/metrics"):
            assert client.get(path).status_code == 200


def test_a_trace_reaches_the_record() -> None:
    known = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with http_server() as server, httpx.Client(base_url=server.url) as client:
        traces: list[str] = []
        server.service.observers.append(lambda record: traces.append(record.request.trace_parent))
        for trace in (known, "00-odd"):
            client.post("/v1/completions", json=SHORT, headers={"traceparent": trace}).raise_for_status()
    assert traces == [known, ""]


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="max_body_bytes 0"):
        HttpOptions(max_body_bytes=0)
