"""The body of a request: bounded in size and time, JSON and nothing else."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NoReturn

from starlette.requests import Request

from server.http.errors import ApiError, bad_request
from server.http.fields import shown

MAX_DEPTH = 32
"""Objects and lists inside one another: no parameter needs more, and no template must meet it."""
_DISCARDED_LIMITS = 4
"""How many times the limit is read and thrown away, so that the client is there to hear of it."""


async def read_json_object(request: Request, max_bytes: int, max_seconds: float) -> dict[str, Any]:
    """The body as a JSON object.

    Raises ApiError: 415 for another content type, 413 beyond max_bytes, 408 beyond max_seconds, 400 for
    what is no JSON object. NaN, infinities and unpaired surrogates are no JSON here.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"content type {shown(kind)} is not supported; expected application/json")
    try:
        async with asyncio.timeout(max_seconds):
            body = await _read(request, max_bytes)
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {max_seconds:g} seconds") from None
    return parse_object(body)


def parse_object(body: bytes) -> dict[str, Any]:
    """See read_json_object."""
    try:
        value = json.loads(body.decode(), parse_constant=_refuse_constant)
        if b"\\u" in body:
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise bad_request(f"the body is not valid JSON: {error}") from None
    except UnicodeDecodeError as error:
        raise bad_request(f"the body is not valid UTF-8: byte {error.start}") from None
    except UnicodeEncodeError:
        raise bad_request("the body has an unpaired surrogate, which is not a character") from None
    except RecursionError:
        raise bad_request(f"the body is nested too deeply; the limit is {MAX_DEPTH} levels") from None
    except ValueError as error:
        raise bad_request(f"the body is not acceptable JSON: {error}") from None
    _check_depth(value)
    if not isinstance(value, dict):
        raise bad_request(f"the body is {shown(value)}; expected an object")
    return value


def _check_depth(value: object) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        children = [
            one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)
        ]
        level = [child for group in children for child in group if isinstance(child, dict | list)]
        if not level:
            return
    raise bad_request(f"the body is nested too deeply; the limit is {MAX_DEPTH} levels")


async def _read(request: Request, max_bytes: int) -> bytes:
    body = bytearray()
    num_bytes = 0
    async for part in request.stream():
        num_bytes += len(part)
        if num_bytes <= max_bytes:
            body += part
        elif num_bytes > _DISCARDED_LIMITS * max_bytes:
            break
        else:
            body.clear()
    if num_bytes > max_bytes:
        raise ApiError(413, f"the body is larger than the limit of {max_bytes} bytes")
    return bytes(body)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
