"""Several models over HTTP: which answers, what the headers say of it, and what is here at all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

pytest.importorskip("starlette")
httpx = pytest.importorskip("httpx")

from server.core import GenerateRequest, Routes  # noqa: E402
from server.http.app import build_app  # noqa: E402
from server.http.options import HttpOptions  # noqa: E402
from tests.server.harness import ENDLESS  # noqa: E402
from tests.server.routing import FALLBACKS, routed  # noqa: E402

BODY = {"prompt": "one", "max_tokens": 3, "temperature": 0, "ignore_eos": True}


@asynccontextmanager
async def served(
    options: HttpOptions | None = None, **settings: Any
) -> AsyncIterator[tuple[Routes, httpx.AsyncClient]]:
    async with routed(FALLBACKS, **settings) as routes:
        transport = httpx.ASGITransport(build_app(routes, options))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            yield routes, client


def test_a_request_names_its_model_and_the_answer_says_which_it_was() -> None:
    async def main() -> None:
        async with served() as (_, client):
            for model in ("chat", "tiny"):
                answer = await client.post("/v1/completions", json=BODY | {"model": model})
                assert answer.json()["model"] == model
                assert answer.headers["x-jaxserve-route"] == model
                assert answer.headers["x-jaxserve-route-reason"] == "requested"
            answer = await client.post("/v1/completions", json=BODY)
            assert (answer.json()["model"], answer.headers["x-jaxserve-route-reason"]) == ("chat", "default")
            answer = await client.post("/v1/completions", json=BODY | {"model": "gpt-4"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
            listed = (await client.get("/v1/models")).json()["data"]
            assert [one["id"] for one in listed] == ["chat", "small", "tiny"]
            assert (await client.get("/v1/models/small")).json()["root"] == "small model"
            for path in ("/tokenize", "/detokenize"):
                body = {"prompt": "x"} if path == "/tokenize" else {"tokens": [5]}
                assert (await client.post(path, json=body | {"model": "tiny"})).status_code == 200
                assert (await client.post(path, json=body | {"model": "gpt-4"})).status_code == 404

    asyncio.run(main())


def test_overflow_over_http() -> None:
    async def main() -> None:
        async with served() as (routes, client):
            running = await routes.generate(
                GenerateRequest(text="x", params=ENDLESS, fallback_route="chat", model="chat")
            )
            async with running:
                for stream in (False, True):
                    answer = await client.post(
                        "/v1/completions", json=BODY | {"model": "chat", "stream": stream}
                    )
                    assert answer.headers["x-jaxserve-route"] == "small"
                    why = "overflow of chat: 0 requests wait already; the limit is 0"
                    assert answer.headers["x-jaxserve-route-reason"] == why
                    assert '"model":"small"' in answer.text.replace(" ", "")
                body = BODY | {"model": "chat", "fallback_route": "tiny"}
                answer = await client.post("/v1/completions", json=body)
                assert answer.json()["model"] == "tiny"
                answer = await client.post("/v1/completions", json=body | {"fallback_route": "chat"})
                assert (answer.status_code, "retry-after" in answer.headers) == (429, True)
                answer = await client.post("/v1/completions", json=body | {"fallback_route": 5})
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, "fallback_route")
                many = body | {"prompt": ["one", "two"], "fallback_route": "small"}
                answer = await client.post("/v1/completions", json=many)
                assert answer.status_code == 429  # Both or neither: each route has room for one.

    asyncio.run(main())


def test_parameters_that_a_body_leaves_out_are_the_model_s_own() -> None:
    async def main() -> None:
        async with served(defaults={"chat": {"max_tokens": 5, "temperature": 0.0}}) as (_, client):
            body = {"prompt": "one", "ignore_eos": True}
            answer = (await client.post("/v1/completions", json=body)).json()
            assert answer["usage"]["completion_tokens"] == 5
            answer = (await client.post("/v1/completions", json=body | {"max_tokens": 7})).json()
            assert answer["usage"]["completion_tokens"] == 7
            chat = {"messages": [{"role": "user", "content": "hi"}], "ignore_eos": True}
            answer = (await client.post("/v1/chat/completions", json=chat)).json()
            assert answer["usage"]["completion_tokens"] == 5
            answer = (
                await client.post("/v1/chat/completions", json=chat | {"max_completion_tokens": 6})
            ).json()
            assert answer["usage"]["completion_tokens"] == 6

    asyncio.run(main())


def test_the_root_says_what_is_here() -> None:
    async def main() -> None:
        async with served() as (_, client):
            found = (await client.get("/")).json()
            assert found["server"] == "jaxserve"
            assert found["models"] == dict.fromkeys(FALLBACKS, "ready")
            assert {"/v1/chat/completions", "/v1/models", "/health"} <= set(found["paths"])

    asyncio.run(main())


def test_pages_of_other_origins_may_ask_only_if_the_operator_says_so() -> None:
    ask = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
    options = HttpOptions(tokens={"secret": "a"}, allow_origins=("https://page.example",))

    async def main() -> None:
        async with served() as (_, client):
            answer = await client.get("/v1/models", headers={"Origin": "https://page.example"})
            assert "access-control-allow-origin" not in answer.headers
        async with served(options) as (_, client):
            answer = await client.options("/v1/chat/completions", headers=ask)  # Asked without a token.
            assert answer.status_code == 200
            assert answer.headers["access-control-allow-origin"] == "https://page.example"
            stranger = await client.options("/v1/models", headers=ask | {"Origin": "https://other.example"})
            assert stranger.status_code == 400
            answer = await client.get("/v1/models", headers=ask)
            assert (answer.status_code, "access-control-allow-origin" in answer.headers) == (401, True)
            answer = await client.get("/v1/models", headers=ask | {"Authorization": "Bearer secret"})
            assert "x-jaxserve-route" in answer.headers["access-control-expose-headers"]

    asyncio.run(main())
