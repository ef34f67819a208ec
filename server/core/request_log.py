"""One structured line for each request that has ended or was refused."""

from __future__ import annotations

import json
import queue
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from server.core.requests import RequestRecord

_LONGEST_QUEUE = 10_000
"""Records that may wait for a slow disk or terminal. What comes beyond is dropped, and that is written."""
_LAST_WORDS = 2.0
"""Seconds that closing gives the last lines: whoever does not read them must not keep the process."""


class RequestLog:
    """An observer of a service that writes a JSON object to a line, on a thread of its own.

    The event loop, which has streams to serve, only puts a record in a queue.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        close_stream: bool = False,
        longest_queue: int = _LONGEST_QUEUE,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Start writing.

        Args:
            stream: takes whole lines.
            close_stream: whether `close` closes it too.
            longest_queue: records that may wait to be written.
            clock: seconds since 1970.
        """
        self._stream = stream
        self._close_stream = close_stream
        self._clock = clock
        self._records: queue.Queue[tuple[float, RequestRecord] | None] = queue.Queue(longest_queue)
        self._num_dropped = 0
        self._thread = threading.Thread(target=self._run, name="jaxserve-request-log", daemon=True)
        self._thread.start()

    def __call__(self, record: RequestRecord) -> None:
        """Take a record; it is written soon."""
        try:
            self._records.put_nowait((self._clock(), record))
        except queue.Full:
            self._num_dropped += 1

    def close(self) -> None:
        """Write what has come, and stop."""
        try:
            self._records.put(None, timeout=_LAST_WORDS)
        except queue.Full:
            return  # Nobody takes the lines; the thread ends with the process.
        self._thread.join(_LAST_WORDS)
        if self._close_stream and not self._thread.is_alive():
            self._stream.close()

    def __enter__(self) -> RequestLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        reported = 0
        while (item := self._records.get()) is not None:
            lines = [_line(*item)]
            if self._num_dropped > reported:
                dropped, reported = self._num_dropped - reported, self._num_dropped
                lines.append(json.dumps({"time": _timestamp(self._clock()), "dropped_lines": dropped}))
            try:
                self._stream.write("\n".join(lines) + "\n")
                if self._records.empty():
                    self._stream.flush()
            except (OSError, ValueError) as error:  # A full disk, a closed pipe: serving goes on without.
                print(f"the request log has ended: {error}", file=sys.stderr)
                return


def open_request_log(target: str) -> RequestLog | None:
    """The log that an operator asks for: a file to append to, "-" for standard error, or "off".

    Raises OSError for a file that cannot be written.
    """
    if target == "off":
        return None
    if target == "-":
        return RequestLog(sys.stderr)
    return RequestLog(Path(target).open("a", encoding="utf-8"), close_stream=True)


def describe(record: RequestRecord) -> dict[str, Any]:
    """What the line holds: counts, seconds, and how the answer came about, but never what was said."""
    request, metrics = record.request, record.output.metrics if record.output is not None else None
    line: dict[str, Any] = {
        "request_id": record.request_id,
        "outcome": record.outcome,
        "model": request.model or "",
        "tenant": request.tenant,
        "class": request.priority_class,
        "prompt_tokens": record.num_prompt_tokens,
        "completion_tokens": record.num_streamed,
        "total_seconds": _rounded(record.end_time - record.arrival_time),
        "first_token_seconds": _since(record.arrival_time, record.first_token_time),
    }
    if record.output is not None and metrics is not None:
        line |= {
            "finish_reasons": [sample.finish_reason for sample in record.output.outputs],
            "cached_tokens": record.output.num_cached_tokens,
            "queue_seconds": _rounded(metrics.queue_seconds),
            "prefill_seconds": _since(metrics.scheduled_time, metrics.first_token_time),
            "decode_seconds": _since(metrics.first_token_time, metrics.finish_time),
            "preemptions": metrics.num_preemptions,
        }
    if record.error is not None:
        line["error"] = record.error.message
    if request.trace_parent:
        line["trace_parent"] = request.trace_parent
    if record.receipt is not None:
        line["receipt"] = asdict(record.receipt)
    return line


def _line(at: float, record: RequestRecord) -> str:
    return json.dumps({"time": _timestamp(at), **describe(record)}, ensure_ascii=False)


def _timestamp(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")


def _since(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else _rounded(end - start)


def _rounded(seconds: float | None) -> float | None:
    """To microseconds."""
    return None if seconds is None else round(seconds, 6)
