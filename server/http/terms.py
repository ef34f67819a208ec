"""What a call says of how it is served, beside what is asked: read before the endpoint's own parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jaxserve.weights.generation_config import SAMPLING_DEFAULTS
from server.core.retries import PRIORITY_HEADER, is_marked_retry
from server.http.answers import Json
from server.http.errors import ApiError, bad_request
from server.http.fields import Fields, shown

TIMEOUT_HEADER = "x-jaxserve-timeout"
"""Seconds after which the answer is worth nothing."""
_NAMES = ("fallback_route", "priority", "cache_salt", "cache_namespace", "cache_read", "cache_write")


@dataclass(frozen=True)
class CallTerms:
    """How a call is served."""

    absent: frozenset[str]
    """Parameters that the client left out, and for which a model may have its own default."""
    fallback_route: str
    """The one other model that may answer, "" for those that the operator chose."""
    priority: str
    """A priority class, "" for the usual one."""
    is_retry: bool
    deadline: float | None
    """Seconds from now."""
    cache_namespace: str | None
    cache_read: bool
    cache_write: bool


def split_terms(body: Json, headers: Mapping[str, str]) -> tuple[CallTerms, Json]:
    """The terms, and the body without what was only theirs. Raises ApiError (400) naming what is wrong.

    `headers`: by names in lower case; the body has the last word.
    """
    rest = dict(body)
    own = Fields({name: rest.pop(name) for name in _NAMES if name in rest})
    given = {name for name, value in body.items() if value is not None}
    if "max_completion_tokens" in given:
        given.add("max_tokens")
    terms = CallTerms(
        absent=SAMPLING_DEFAULTS - given,
        fallback_route=own.text("fallback_route") or "",
        priority=_read_priority(own) or headers.get(PRIORITY_HEADER, ""),
        is_retry=is_marked_retry(headers),
        deadline=_read_timeout(headers),
        cache_namespace=_read_namespace(own),
        cache_read=own.flag("cache_read", True),
        cache_write=own.flag("cache_write", True),
    )
    return terms, rest


def _read_priority(own: Fields) -> str | None:
    """vLLM's numbers have no meaning here, where classes have names; 0, its default, asks for nothing."""
    value = own.take("priority")
    if isinstance(value, str):
        return value
    if value is not None and (value != 0 or isinstance(value, bool)):
        raise own.wrong("priority", value, "the name of a priority class")
    return None


def _read_namespace(own: Fields) -> str | None:
    """`cache_salt` is vLLM's name for it."""
    name, salt = own.text("cache_namespace"), own.text("cache_salt")
    if name is not None and salt is not None:
        raise bad_request("cache_salt and cache_namespace are the same thing: give one", "cache_salt")
    return salt if name is None else name


def _read_timeout(headers: Mapping[str, str]) -> float | None:
    text = headers.get(TIMEOUT_HEADER)
    if text is None:
        return None
    try:
        return float(text)
    except ValueError:
        raise _bad_timeout(text) from None


def _bad_timeout(text: str) -> ApiError:
    return bad_request(f"{TIMEOUT_HEADER} is {shown(text)}; expected a number of seconds", TIMEOUT_HEADER)
