"""What a body says of how it is served, beside what is asked: read before the endpoint's own parameters."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.weights.generation_config import SAMPLING_DEFAULTS
from server.http.answers import Json
from server.http.fields import Fields


@dataclass(frozen=True)
class CallTerms:
    """How a call is served."""

    absent: frozenset[str]
    """Parameters that the client left out, and for which a model may have its own default."""
    fallback_route: str
    """The one other model that may answer, "" for those that the operator chose."""


def split_terms(body: Json) -> tuple[CallTerms, Json]:
    """The terms, and the body without what was only theirs. Raises ApiError (400) naming what is wrong."""
    rest = dict(body)
    own = {name: rest.pop(name) for name in ("fallback_route",) if name in rest}
    fallback_route = Fields(own).text("fallback_route") or ""
    given = {name for name, value in body.items() if value is not None}
    if "max_completion_tokens" in given:
        given.add("max_tokens")
    return CallTerms(SAMPLING_DEFAULTS - given, fallback_route), rest
