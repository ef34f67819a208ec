"""Errors as OpenAI's clients read them: a status, and `{"error": {message, type, param, code}}`."""

from __future__ import annotations

import math
import re
from dataclasses import fields
from typing import Any

from jaxserve.plan import SamplingParams
from server.core import HTTP_CODES, ServiceError, Status

DEFAULT_RETRY_SECONDS = 1.0
ERROR_HEADERS = ("retry-after", "x-jaxserve-reason")

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
"""Of the others, those from 400 on are the client's fault and those from 500 on the server's."""
_PARAMETERS = frozenset(field.name for field in fields(SamplingParams)) - {"grammar"} | {"prompt"}
"""A grammar has several names here, and none of them is its own."""


class ApiError(Exception):
    """A request that gets an error for an answer."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
        reason: str = "",
    ) -> None:
        """An error.

        Args:
            status: HTTP's.
            message: for the client.
            param: the parameter at fault.
            code: a word for programs.
            retry_after: seconds.
            reason: what there is too much of, in a word.
        """
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after
        self.reason = reason

    def body(self) -> dict[str, Any]:
        usual = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, usual),
                "param": self.param,
                "code": self.code,
            }
        }

    def headers(self) -> dict[str, str]:
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        headers: dict[str, str] = {}
        if self.retry_after is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after)))
        if self.reason:
            headers["X-Jaxserve-Reason"] = self.reason
        return headers


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """The request itself is wrong, and will be however often it is sent."""
    return ApiError(400, message, param=param, code=code)


def from_service(error: ServiceError) -> ApiError:
    """What a service's error is in HTTP; one map for all of them. "Later" always comes with a time."""
    status = HTTP_CODES[error.status]
    later = error.retry_after if error.retry_after is not None else DEFAULT_RETRY_SECONDS
    return ApiError(
        status,
        error.message,
        param=param_in(error.message),
        code="model_not_found" if error.status is Status.NOT_FOUND else error.status.value,
        retry_after=later if status in (429, 503) else None,
        reason=error.reason,
    )


def param_in(message: str) -> str | None:
    """The parameter that a message is about: the library's begin with its name."""
    word = re.match(r"\w+", message)
    return word[0] if word and word[0] in _PARAMETERS else None
