"""What leaves the process for each request: its log line and its spans, as the operator wants them."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from server.core.request_log import open_request_log
from server.core.requests import RequestRecord
from server.core.telemetry.otlp import make_provider, wants_spans

_LAST_WORDS = 3.0
"""Seconds for the last spans to reach their collector."""


@dataclass(frozen=True, kw_only=True)
class OutletOptions:
    """Where requests are written to."""

    request_log: str = "-"
    """A file to append to, "-" for standard error, or "off"."""
    otlp_endpoint: str | None = None
    """Of a collector of spans; None leaves it to OpenTelemetry's environment variables."""
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)


class Outlets:
    """Open while the server runs: `observers` belong to each of its services."""

    def __init__(self, options: OutletOptions | None = None) -> None:
        """Raises ValueError for options that cannot be had, OSError for a log that cannot be written."""
        options = options or OutletOptions()
        self.observers: list[Callable[[RequestRecord], object]] = []
        self._closers: list[Callable[[], object]] = []
        if wants_spans(options.otlp_endpoint, options.environ):
            provider = make_provider(options.otlp_endpoint, options.environ)
            from server.core.telemetry.spans import RequestSpans

            self.observers.append(RequestSpans(provider))
            self._closers.append(functools.partial(_within, _LAST_WORDS, provider.shutdown))
        log = open_request_log(options.request_log)
        if log is not None:
            self.observers.append(log)
            self._closers.append(log.close)

    def close(self) -> None:
        """Write what is left, and stop. What nobody takes within seconds is lost."""
        for close in self._closers:
            close()


def _within(seconds: float, action: Callable[[], object]) -> None:
    """Do something on a thread, and wait for it so long at most: it must not keep the process."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(seconds)
