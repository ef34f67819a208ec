"""W3C trace context, as callers hand it on."""

from __future__ import annotations

import re

_TRACE_PARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


def read_trace_parent(header: str | None) -> str:
    """The `traceparent` header, "" where there is none or a malformed one, which the standard bids ignore."""
    return header if header is not None and _TRACE_PARENT.fullmatch(header) else ""
