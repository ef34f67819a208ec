"""The body of a request: bounded in size and time, JSON and nothing else."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request

from server.http.errors import ApiError
from server.http.fields import shown
from server.http.json_object import parse_object

_DISCARDED_LIMITS = 4
"""How many times the limit is read and thrown away, so that the client is there to hear of it."""


async def read_json_object(request: Request, max_bytes: int, max_seconds: float) -> dict[str, Any]:
    """The body as a JSON object.

    Raises ApiError: 415 for another content type, 413 beyond max_bytes, 408 beyond max_seconds, 400 as
    `parse_object`.
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
