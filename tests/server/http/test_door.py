"""The HTTP door as `jaxserve serve` opens it."""

from __future__ import annotations

import asyncio
import time

import pytest

pytest.importorskip("starlette")
httpx = pytest.importorskip("httpx")

from server.core import Routes  # noqa: E402
from server.http_door import HttpDoor  # noqa: E402
from tests.server.harness import serving  # noqa: E402

DELAYED_ACKNOWLEDGEMENT = 0.04
"""Seconds that a client's kernel may wait before it acknowledges what it got."""


@pytest.mark.alone
def test_a_short_answer_does_not_wait_for_an_acknowledgement() -> None:
    async def fastest_answer() -> float:
        async with serving() as (service, _):
            door = HttpDoor(Routes.of(service))
            address = await door.start()
            times = []
            async with httpx.AsyncClient(base_url=address) as client:
                for _ in range(12):
                    started = time.perf_counter()
                    answer = await client.post("/tokenize", json={"prompt": "hello"})
                    times.append(time.perf_counter() - started)
                    assert answer.status_code == 200
            await door.stop(0)
            # The first exchanges of a connection are acknowledged at once.
            return min(times[4:])

    assert asyncio.run(fastest_answer()) < DELAYED_ACKNOWLEDGEMENT / 2
