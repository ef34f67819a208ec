"""W3C trace context, as callers hand it on."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

_TRACE_PARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_MAX_STATE_LEN = 512
"""Characters of `tracestate` that the standard asks everybody to hand on; a longer one is dropped."""


class TraceContext(NamedTuple):
    """Within which trace a call is made."""

    parent: str
    """The `traceparent` header, "" where there is none or a malformed one, which the standard bids ignore."""
    state: str
    """The `tracestate` header that belongs to it, which is left as it is."""


def read_trace(headers: Mapping[str, str]) -> TraceContext:
    """The trace context in a call's headers, whose names are in lower case."""
    parent = headers.get("traceparent", "")
    if not _TRACE_PARENT.fullmatch(parent):
        return TraceContext("", "")
    state = headers.get("tracestate", "")
    return TraceContext(parent, state if len(state) <= _MAX_STATE_LEN else "")
