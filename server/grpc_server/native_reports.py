"""How a service stands and what it has done, as messages of the native protocol."""

from __future__ import annotations

import time

from jaxserve.scheduling import ClassLoad
from server.core import Service
from server.core.statistics import ClassStatistics
from server.proto.jaxserve.v1 import engine_pb2 as pb


def write_load(service: Service) -> pb.GetLoadResponse:
    """How busy a service is now."""
    load = service.load()
    return pb.GetLoadResponse(
        running=load.num_running,
        waiting=load.num_waiting,
        slots=load.num_slots,
        free_pages=load.num_free_pages,
        pages=load.num_pages,
        page_size=load.page_size,
        kv_usage=load.kv_usage,
        tokens_per_second=load.tokens_per_second,
        draining=service.draining,
        classes=map(_class_load, service.engine.class_loads()),
    )


def _class_load(load: ClassLoad) -> pb.ClassLoad:
    return pb.ClassLoad(
        name=load.name,
        waiting=load.num_waiting,
        running=load.num_running,
        waiting_tokens=load.num_waiting_tokens,
        waiting_pages=load.num_waiting_pages,
        requests_per_second=load.requests_per_second,
        tokens_per_second=load.tokens_per_second,
    )


def write_stats(service: Service) -> pb.GetStatsResponse:
    """What a service has done since it started, without its metrics."""
    statistics = service.statistics
    return pb.GetStatsResponse(
        uptime_seconds=time.monotonic() - service.started_at,
        admitted=statistics.num_admitted,
        refused={status.value: count for status, count in statistics.num_refused.items()},
        finished=statistics.num_finished,
        failed={status.value: count for status, count in statistics.num_failed.items()},
        prompt_tokens=statistics.num_prompt_tokens,
        completion_tokens=statistics.num_completion_tokens,
        preemptions=statistics.num_preemptions,
        steps=service.engine.snapshot().num_steps,
        rejected=statistics.num_rejected,
        cached_tokens=statistics.num_cached_tokens,
        prefixes=_prefix_stats(service),
        classes={name: _class_stats(one) for name, one in statistics.classes.items()},
    )


def _prefix_stats(service: Service) -> pb.PrefixStats | None:
    prefixes = service.engine.snapshot().prefixes
    if prefixes is None:
        return None
    return pb.PrefixStats(
        query_tokens=prefixes.query_tokens,
        hit_tokens=prefixes.hit_tokens,
        saved_seconds=prefixes.saved_milliseconds / 1000.0,
        stored_pages=prefixes.stored_pages,
        evicted_pages=prefixes.evicted_pages,
    )


def _class_stats(one: ClassStatistics) -> pb.ClassStats:
    return pb.ClassStats(judged=one.num_judged, good=one.num_good, good_tokens=one.num_good_tokens)
