"""The scheduling half of the host: requests, pages, plans. Pure Python and numpy, never jax."""

from jaxserve.scheduling.pages import PagePool, PageTable, SharedPrefix
from jaxserve.scheduling.request import FinishReason, Request, RequestState, Submission
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.step import ScheduledStep, StepPart

__all__ = [
    "FinishReason",
    "PagePool",
    "PageTable",
    "Request",
    "RequestState",
    "ScheduledStep",
    "Scheduler",
    "SharedPrefix",
    "StepPart",
    "Submission",
]
