"""How a request may fail, in words that every door translates into its own."""

from __future__ import annotations

from enum import Enum

from jaxserve.device_loss import DeviceLostError
from jaxserve.loop import LoopStoppedError
from jaxserve.structured import CheckLostError

RETRY_SECONDS = 1.0
"""After which what was too much or gone for now may be there again."""


class Status(Enum):
    """Why a request was not answered. The names are gRPC's."""

    INVALID_ARGUMENT = "invalid_argument"
    """The request itself is wrong; the message names the value and the limit."""
    UNAUTHENTICATED = "unauthenticated"
    NOT_FOUND = "not_found"
    """No such model."""
    RESOURCE_EXHAUSTED = "resource_exhausted"
    """Too much is waiting; worth another try after `retry_after`."""
    DEADLINE_EXCEEDED = "deadline_exceeded"
    CANCELLED = "cancelled"
    """By the client."""
    UNAVAILABLE = "unavailable"
    """The server is going away, or what it needs for this request is gone for now; another one may answer,
    or this one after `retry_after`."""
    UNIMPLEMENTED = "unimplemented"
    """The server does not have what the request asks for."""
    INTERNAL = "internal"
    """The engine has failed."""


HTTP_CODES: dict[Status, int] = {
    Status.INVALID_ARGUMENT: 400,
    Status.UNAUTHENTICATED: 401,
    Status.NOT_FOUND: 404,
    Status.RESOURCE_EXHAUSTED: 429,
    Status.DEADLINE_EXCEEDED: 504,
    Status.CANCELLED: 499,
    Status.UNAVAILABLE: 503,
    Status.UNIMPLEMENTED: 501,
    Status.INTERNAL: 500,
}
"""499 is nginx's for a client that has gone: nobody reads it but the logs."""


class ServiceError(Exception):
    """A request ends with a status and a sentence for its client."""

    def __init__(
        self, status: Status, message: str, retry_after: float | None = None, *, reason: str = ""
    ) -> None:
        """A request's end.

        Args:
            status: in every door's words.
            message: for its client.
            retry_after: seconds after which another try is worth it, where that is known.
            reason: of a request that there is no room for: in a word or two, for counting, what is full.
        """
        super().__init__(message)
        self.status = status
        self.message = message
        self.retry_after = retry_after
        self.reason = reason


def deadline_passed() -> ServiceError:
    """What a client is told who does not want the answer any more."""
    return ServiceError(Status.DEADLINE_EXCEEDED, "the deadline has passed before the answer's end")


def engine_failed(cause: BaseException | None) -> ServiceError:
    """What clients are told when the engine has stopped; the log has the cause."""
    if isinstance(cause, DeviceLostError):
        return ServiceError(Status.UNAVAILABLE, f"the engine serves nothing any more: {cause}")
    return ServiceError(Status.INTERNAL, "the engine has failed and serves nothing any more")


def from_engine(error: LoopStoppedError | CheckLostError | ValueError) -> ServiceError:
    """What a client is told whose request the engine does not take, or no longer."""
    if isinstance(error, LoopStoppedError):
        return engine_failed(error.__cause__)
    if isinstance(error, CheckLostError):
        return ServiceError(Status.UNAVAILABLE, str(error), RETRY_SECONDS)
    return ServiceError(Status.INVALID_ARGUMENT, str(error))
