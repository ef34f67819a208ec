"""The line for each request: what it holds, what it never holds, and that nobody waits for it."""

from __future__ import annotations

import asyncio
import io
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from server.core import GenerateRequest, ServiceError, Status
from server.core.request_log import RequestLog, describe, open_request_log
from tests.server.harness import ENDLESS, GREEDY, IDENTITY, serving
from tests.server.simulated_day import make_output, make_record

TRACE = f"00-{'a' * 32}-{'b' * 16}-01"


class StuckStream(io.StringIO):
    """A terminal that takes nothing until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()

    def write(self, text: str) -> int:
        assert self.released.wait(10)
        return super().write(text)


class BrokenStream(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError("no space left on device")


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_each_request_of_a_service_has_its_line() -> None:
    stream = io.StringIO()

    async def main() -> None:
        async with serving() as (service, _):
            service.observers.append(log)
            asked = GenerateRequest(
                text="a secret prompt", params=GREEDY, request_id="named", tenant="alice", trace_parent=TRACE
            )
            output = [delta async for delta in await service.generate(asked)][-1].output
            assert output is not None
            assert output.outputs[0].text
            with pytest.raises(ServiceError):
                await service.generate(GenerateRequest(text="x", params=GREEDY, priority="odd"))
            generation = await service.generate(GenerateRequest(text="x", params=ENDLESS))
            await anext(generation)
            await generation.aclose()
            texts.append(output.outputs[0].text)

    texts: list[str] = []
    with RequestLog(stream, clock=lambda: 0.0) as log:
        asyncio.run(main())
    answered, refused, left = lines(stream)
    assert answered["time"] == "1970-01-01T00:00:00.000+00:00"
    assert (answered["request_id"], answered["tenant"], answered["class"]) == ("named", "alice", "default")
    assert answered["outcome"] == "length"
    assert answered["finish_reasons"] == ["length"]
    assert (answered["completion_tokens"], answered["cached_tokens"]) == (12, 0)
    assert answered["trace_parent"] == TRACE
    assert 0 <= answered["queue_seconds"] <= answered["first_token_seconds"] <= answered["total_seconds"]
    receipt = answered["receipt"]
    assert receipt["model_fingerprint"] == IDENTITY.fingerprint
    assert (receipt["precision"], receipt["kv_format"]) == (IDENTITY.precision, IDENTITY.kv_format)
    assert (receipt["decoding"], receipt["reused_tokens"]) == ("greedy", 0)
    assert receipt["route"]
    assert receipt["route_reason"] == "requested"
    assert (refused["outcome"], refused["class"]) == ("invalid_argument", "odd")
    assert "receipt" not in refused
    assert (left["outcome"], left["completion_tokens"]) == ("cancelled", 1)
    assert "secret" not in stream.getvalue()
    assert texts[0] not in stream.getvalue()


def test_what_was_said_is_in_no_line() -> None:
    messages = [{"role": "user", "content": "a secret prompt"}]
    for record in (make_record(), make_record(text=None, messages=messages)):
        assert "secret" not in json.dumps(describe(record))


@pytest.mark.alone
def test_a_stuck_terminal_holds_nobody_up_and_what_it_cost_is_written() -> None:
    stream = StuckStream()
    log = RequestLog(stream, longest_queue=10)
    record = make_record(make_output())
    start = time.perf_counter()
    for _ in range(1000):
        log(record)
    assert time.perf_counter() - start < 1.0
    stream.released.set()
    deadline = time.monotonic() + 10
    while log._records.qsize() and time.monotonic() < deadline:
        time.sleep(0.001)
    log(record)
    log.close()
    found = lines(stream)
    written = [line for line in found if "request_id" in line]
    dropped = sum(line.get("dropped_lines", 0) for line in found)
    assert dropped > 900
    assert len(written) + dropped == 1001


def test_a_log_that_breaks_ends_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with RequestLog(BrokenStream()) as log:
        for _ in range(3):
            log(make_record())
        log._thread.join(10)
    assert capsys.readouterr().err == "the request log has ended: no space left on device\n"


def test_where_the_operator_wants_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "requests.jsonl"
    for _ in range(2):
        log = open_request_log(str(file))
        assert log is not None
        log(make_record(error=ServiceError(Status.INTERNAL, "broken")))
        log.close()
    assert [json.loads(line)["error"] for line in file.read_text().splitlines()] == ["broken"] * 2
    assert open_request_log("off") is None
    log = open_request_log("-")
    assert log is not None
    log(make_record())
    log.close()
    assert json.loads(capsys.readouterr().err)["outcome"] == "length"
    with pytest.raises(OSError, match="nowhere"):
        open_request_log(str(tmp_path / "nowhere" / "file"))
