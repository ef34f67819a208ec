"""The terms on which a request is served: whose it is, how urgent, and what it may share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ServiceTerms:
    """What decides when a request is served and what it costs, and never what it answers."""

    tenant: str = ""
    """Who pays: fair shares are between tenants."""
    priority: str = "default"
    """The name of a priority class."""
    deadline: float | None = None
    """Seconds on the loop's clock after which the answer is worth nothing."""
    is_retry: bool = False
    """Whether its caller was refused before and tries again; retries have a budget."""
    namespace: str | None = None
    """Requests share cached prefixes only within a namespace; None is the tenant's own."""
    cache_read: bool = True
    """Whether it may start on pages that others computed."""
    cache_write: bool = True
    """Whether others may start on its pages."""


DEFAULT_TERMS = ServiceTerms()
