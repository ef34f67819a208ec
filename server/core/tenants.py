"""Who may come in, and as which tenant."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from jaxserve.scheduling import CacheScope
from server.core.errors import ServiceError, Status


class Tenants:
    """Who may come in. Without tokens everybody may, as the tenant that a request names."""

    def __init__(self, tokens: Mapping[str, str] | None) -> None:
        """`tokens`: the tenant of each token; None asks nobody for one."""
        # Looked up by digest: how long a look-up takes tells nothing of a token.
        self._tenants = None if tokens is None else {_digest(token): name for token, name in tokens.items()}

    @property
    def asks_for_tokens(self) -> bool:
        """Whether callers are told apart."""
        return self._tenants is not None

    def authenticate(self, authorization: str) -> str:
        """The tenant of an `authorization` header, "" where no token is asked for.

        Raises ServiceError, UNAUTHENTICATED, without a known token.
        """
        if self._tenants is None:
            return ""
        kind, _, token = authorization.partition(" ")
        if kind.lower() != "bearer":
            raise ServiceError(Status.UNAUTHENTICATED, "a bearer token is needed")
        tenant = self._tenants.get(_digest(token.strip()))
        if tenant is None:
            raise ServiceError(Status.UNAUTHENTICATED, "the bearer token is not known")
        return tenant

    def tenant(self, authorization: str, claimed: str) -> str:
        """Whose a request is that names a tenant, or "". Raises ServiceError for somebody else's name."""
        tenant = self.authenticate(authorization)
        if self._tenants is None:
            return claimed
        if claimed not in ("", tenant):
            raise ServiceError(Status.INVALID_ARGUMENT, f"the bearer token is not tenant {claimed!r}'s")
        return tenant


def flushed_scope(tenant: str, namespace: str = "") -> CacheScope | None:
    """What of the prefix cache a caller may clear: the namespace that it names, or what is its own; None is
    everything, for one who is no tenant in particular."""
    if namespace:
        return CacheScope("namespace", namespace)
    return CacheScope("tenant", tenant) if tenant else None


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
