"""OpenTelemetry spans of requests, by an observer of services. Imported only where spans are wanted.

A request's spans are made when it has ended, from times that were taken anyway: a root in the caller's trace,
named as the semantic conventions for generative AI have it, and a child for each phase.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from jaxserve.version import __version__
from server.core.errors import Status
from server.core.requests import RequestRecord

PROVIDER = "jaxserve"
_OUR_FAULT = frozenset({Status.INTERNAL, Status.UNAVAILABLE, Status.DEADLINE_EXCEEDED})
_PROPAGATOR = TraceContextTextMapPropagator()


class RequestSpans:
    """Call it with each record."""

    def __init__(self, provider: trace.TracerProvider) -> None:
        """`provider` decides which traces are sampled and where they go."""
        self._tracer = provider.get_tracer("jaxserve.server", __version__)

    def __call__(self, record: RequestRecord) -> None:
        request = record.request
        parent = _PROPAGATOR.extract({"traceparent": request.trace_parent, "tracestate": request.trace_state})
        nanoseconds = _Clock()
        root = self._tracer.start_span(
            f"{_operation(record)} {_model(record)}".rstrip(),
            parent,
            SpanKind.SERVER,
            attributes=attributes(record),
            start_time=nanoseconds.of(record.arrival_time),
        )
        if root.is_recording():
            if record.error is not None and record.error.status in _OUR_FAULT:
                root.set_status(StatusCode.ERROR, record.error.message)
            self._add_phases(record, root, nanoseconds)
        root.end(nanoseconds.of(record.end_time))

    def _add_phases(self, record: RequestRecord, root: Span, nanoseconds: _Clock) -> None:
        within: Context = trace.set_span_in_context(root)
        for name, start, end in _phases(record):
            child = self._tracer.start_span(name, within, start_time=nanoseconds.of(start))
            child.end(nanoseconds.of(end))
        if record.first_token_time is not None:
            root.add_event("first token", timestamp=nanoseconds.of(record.first_token_time))


class _Clock:
    """From seconds of `time.monotonic` to nanoseconds since 1970, as the clocks stand to each other now."""

    def __init__(self) -> None:
        self._offset = time.time_ns() - time.monotonic_ns()

    def of(self, seconds: float) -> int:
        return self._offset + round(seconds * 1e9)


def attributes(record: RequestRecord) -> dict[str, AttributeValue]:
    """What a request's span says: the conventions' names, vLLM's for times, our own for the rest."""
    request, params, output = record.request, record.request.params, record.output
    said: dict[str, AttributeValue | None] = {
        "gen_ai.operation.name": _operation(record),
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": _model(record),
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k if params.top_k > 0 else None,
        "gen_ai.request.frequency_penalty": params.frequency_penalty,
        "gen_ai.request.presence_penalty": params.presence_penalty,
        "gen_ai.request.seed": params.seed,
        "gen_ai.request.choice.count": params.n if params.n > 1 else None,
        "gen_ai.response.id": record.request_id or None,
        "gen_ai.usage.input_tokens": record.num_prompt_tokens,
        "gen_ai.usage.output_tokens": record.num_streamed,
        "gen_ai.latency.e2e": record.end_time - record.arrival_time,
        "jaxserve.tenant": request.tenant or None,
        "jaxserve.class": request.priority_class,
        "error.type": None if record.error is None else record.error.status.value,
    }
    if record.first_token_time is not None:
        said["gen_ai.latency.time_to_first_token"] = record.first_token_time - record.arrival_time
    if output is not None:
        said |= {
            "gen_ai.response.finish_reasons": [sample.finish_reason for sample in output.outputs],
            "gen_ai.usage.cache_read.input_tokens": output.num_cached_tokens,
            "gen_ai.latency.time_in_queue": output.metrics.queue_seconds,
            "jaxserve.preemptions": output.metrics.num_preemptions,
        }
    if record.receipt is not None:
        said |= {
            "gen_ai.response.model": record.receipt.model,
            "jaxserve.precision": record.receipt.precision,
            "jaxserve.kv_format": record.receipt.kv_format,
            "jaxserve.decoding": record.receipt.decoding,
        }
    return {name: value for name, value in said.items() if value is not None}


def _operation(record: RequestRecord) -> str:
    return "text_completion" if record.request.messages is None else "chat"


def _model(record: RequestRecord) -> str:
    if record.request.model:
        return record.request.model
    return "" if record.receipt is None else record.receipt.model


def _phases(record: RequestRecord) -> Iterator[tuple[str, float, float]]:
    """Name, start and end of those that came to an end."""
    if record.output is None:
        return
    times = record.output.metrics
    if times.scheduled_time is not None:
        yield "queue", record.arrival_time, times.scheduled_time
        if times.first_token_time is not None:
            yield "prefill", times.scheduled_time, times.first_token_time
            yield "decode", times.first_token_time, times.finish_time
