"""What a call says beside its message: who calls, until when, and within which trace."""

from __future__ import annotations

from dataclasses import dataclass

import grpc.aio

from server.core.retries import PRIORITY_HEADER, is_marked_retry
from server.core.tenants import Tenants
from server.core.trace import TraceContext, read_trace


@dataclass(frozen=True, kw_only=True)
class Caller:
    """One call, as far as its message does not tell."""

    tenant: str
    seconds_left: float | None
    """Until the call's own deadline."""
    trace: TraceContext
    priority: str
    """The class that its metadata ask for, "" for none."""
    is_retry: bool
    """Whether its metadata say so."""

    def deadline(self, asked: float | None) -> float | None:
        """The earlier of the call's deadline and the one that the message asks for, in seconds."""
        limits = [seconds for seconds in (self.seconds_left, asked) if seconds is not None]
        return min(limits, default=None)


def identify_caller(context: grpc.aio.ServicerContext, tenants: Tenants, claimed_tenant: str = "") -> Caller:
    """Who calls. Raises ServiceError without a token where one is needed, or for another one's tenant."""
    metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
    return Caller(
        tenant=tenants.tenant(metadata.get("authorization", ""), claimed_tenant),
        seconds_left=context.time_remaining(),
        trace=read_trace(metadata),
        priority=metadata.get(PRIORITY_HEADER, ""),
        is_retry=is_marked_retry(metadata),
    )
