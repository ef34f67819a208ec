"""The scheduling half of the host: requests, pages, plans. Pure Python and numpy, never jax."""

from jaxserve.scheduling.arrivals import Arrivals
from jaxserve.scheduling.classes import SchedulerPolicy
from jaxserve.scheduling.kv_events import KvEventLog, KvSnapshot
from jaxserve.scheduling.overload import AdmissionGate, ClassLoad, OverloadError, Ticket
from jaxserve.scheduling.pages import PagePool, PageTable, SharedPrefix
from jaxserve.scheduling.prefix_cache import CacheIdentity, PrefixCache
from jaxserve.scheduling.prefix_tree_keys import CacheScope
from jaxserve.scheduling.request import FinishReason, Request, RequestState, Submission
from jaxserve.scheduling.scheduler import DEFAULT_POLICY, Scheduler
from jaxserve.scheduling.step import ScheduledStep, ScoredRows
from jaxserve.scheduling.terms import DEFAULT_TERMS, ServiceTerms

__all__ = [
    "FinishReason",
    "DEFAULT_POLICY",
    "DEFAULT_TERMS",
    "AdmissionGate",
    "Arrivals",
    "CacheIdentity",
    "CacheScope",
    "ClassLoad",
    "KvEventLog",
    "KvSnapshot",
    "OverloadError",
    "PagePool",
    "PageTable",
    "PrefixCache",
    "Request",
    "RequestState",
    "ScheduledStep",
    "Scheduler",
    "SchedulerPolicy",
    "SharedPrefix",
    "ScoredRows",
    "ServiceTerms",
    "Submission",
    "Ticket",
]
