"""How a caller says, beside its request, how urgent it is and that it was refused before: at either door."""

from __future__ import annotations

from collections.abc import Mapping

PRIORITY_HEADER = "x-jaxserve-priority"
"""Names a priority class."""
RETRY_HEADER = "x-jaxserve-retry"
_COUNTS = ("grpc-previous-rpc-attempts", "x-stainless-retry-count")
"""What gRPC's own retries and OpenAI's clients count by themselves."""
_NO = frozenset({"", "0", "false", "no"})


def is_marked_retry(headers: Mapping[str, str]) -> bool:
    """Whether headers or metadata, by names in lower case, say that this is not the first try."""
    marks = (headers.get(name, "") for name in (RETRY_HEADER, *_COUNTS))
    return any(mark.strip().lower() not in _NO for mark in marks)
