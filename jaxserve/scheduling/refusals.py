"""What a request is told that is turned away."""

from __future__ import annotations

from typing import Literal

Reason = Literal["queue_full", "tokens", "kv", "tenant_quota", "rate", "deadline", "retry_budget"]


class OverloadError(Exception):
    """A request is refused for now. The message names the value and the limit."""

    def __init__(self, reason: Reason, message: str, retry_after: float) -> None:
        """`retry_after`: seconds after which another try is worth it."""
        super().__init__(message)
        self.reason: Reason = reason
        self.message = message
        self.retry_after = retry_after
