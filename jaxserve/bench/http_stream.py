"""`/v1/completions` of any server that speaks as OpenAI does, through httpx."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import httpx

from jaxserve.bench.traffic import Answerer, DoorError, Piece, Usage

COMPLETIONS = "/v1/completions"
PAGE_SECONDS = 10.0
"""In which a server must say what models it has, or how it fares."""
_SHOWN = 200
"""Characters of an event that is not understood."""
_ROUTE_HEADERS = ("x-jaxserve-route", "x-jaxserve-route-reason")
_Value = TypeVar("_Value")


@asynccontextmanager
async def open_client(url: str, token: str | None = None) -> AsyncIterator[httpx.AsyncClient]:
    """A client without limits of its own: neither of connections nor of time, which an answer may take.

    `token`: that requests bring which have none of their own.
    """
    limits = httpx.Limits(max_connections=None)
    headers = {} if token is None else bearer(token)
    settings: dict[str, Any] = {"limits": limits, "headers": headers, "timeout": None, "trust_env": False}
    async with httpx.AsyncClient(base_url=url, **settings) as client:
        yield client


def bearer(token: str) -> dict[str, str]:
    """The header that says who asks."""
    return {"authorization": f"Bearer {token}"}


async def stream_completion(
    client: httpx.AsyncClient, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> AsyncGenerator[Piece, None]:
    """The answer in the pieces in which it comes, once who gives it, and once the usage.

    `body`: asks for a stream with usage. Raises DoorError if there is no answer, or it breaks off.
    """
    try:
        async with client.stream("POST", COMPLETIONS, json=body, headers=headers) as answer:
            if answer.status_code != httpx.codes.OK:
                raise _refusal(answer, (await answer.aread()).decode(errors="replace"))
            if _ROUTE_HEADERS[0] in answer.headers:
                yield Answerer(*(answer.headers.get(name, "") for name in _ROUTE_HEADERS))
            async for line in answer.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    for piece in _read_event(line.removeprefix("data: ")):
                        yield piece
    except httpx.HTTPError as error:
        raise DoorError(f"{type(error).__name__}: {error}") from error


def _refusal(answer: httpx.Response, text: str) -> DoorError:
    status = answer.status_code
    wait = answer.headers.get("retry-after", "")
    return DoorError(
        f"{status}: {text}", status=status, retry_after=float(wait) if wait.isdecimal() else None
    )


def _read_event(text: str) -> list[Piece]:
    """Raises DoorError, with the server's words, for an error and for what is no completion."""
    try:
        event = json.loads(text)
        if "error" in event:
            raise DoorError(event["error"]["message"])
        pieces: list[Piece] = [_checked(choice["text"], str) for choice in event["choices"]]
        if usage := event.get("usage"):
            details = usage.get("prompt_tokens_details") or {}
            counts = (usage["prompt_tokens"], usage["completion_tokens"], details.get("cached_tokens") or 0)
            pieces.append(Usage(*(_checked(count, int) for count in counts)))
        return pieces
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DoorError(f"no event of a completion: {text[:_SHOWN]}") from error


def _checked(value: object, kind: type[_Value]) -> _Value:
    if not isinstance(value, kind):
        raise TypeError(f"{value!r} is not of type {kind.__name__}")
    return value


async def get_page(client: httpx.AsyncClient, path: str) -> httpx.Response:
    """What the server has there. Raises DoorError if nothing comes within PAGE_SECONDS."""
    try:
        async with asyncio.timeout(PAGE_SECONDS):
            return await client.get(path)
    except httpx.HTTPError as error:
        raise DoorError(f"{type(error).__name__}: {error}") from error
    except TimeoutError as error:
        raise DoorError(f"no answer from {path} within {PAGE_SECONDS:g} s") from error


async def list_models(client: httpx.AsyncClient) -> list[dict[str, Any]]:
    """What the server says of its models, of which there is one at least. Raises DoorError otherwise."""
    silent = f"{client.base_url} does not say which models it has"
    try:
        answer = await get_page(client, "/v1/models")
    except DoorError as error:
        raise DoorError(f"{silent}: {error}") from error
    if answer.status_code != httpx.codes.OK:
        raise DoorError(f"{silent}: {answer.status_code} {answer.reason_phrase}")
    if not (listed := answer.json()["data"]):
        raise DoorError(f"{client.base_url} has no model")
    return listed
