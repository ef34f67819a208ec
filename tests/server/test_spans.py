"""OpenTelemetry spans of requests, taken in memory, and by a collector where the exporter is installed."""

from __future__ import annotations

import asyncio
from concurrent import futures
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.trace import SpanKind, StatusCode

from server.core import GenerateRequest, ServiceError, Status
from server.core.telemetry.otlp import make_provider, wants_spans
from server.core.telemetry.outlets import OutletOptions, Outlets
from server.core.telemetry.spans import RequestSpans, attributes
from tests.server.harness import GREEDY, IDENTITY, serving
from tests.server.simulated_day import make_output, make_record

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = (f"00-{TRACE_ID}-{PARENT_ID}-{flags}" for flags in ("01", "00"))
KNOWN = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI")}
VLLM = {f"gen_ai.latency.{name}" for name in ("e2e", "time_to_first_token", "time_in_queue")}
"""Names that are vLLM's."""


class Recorder:
    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.spans = RequestSpans(provider)

    def take(self) -> dict[str, ReadableSpan]:
        found = {span.name: span for span in self._exporter.get_finished_spans()}
        self._exporter.clear()
        return found


def test_a_request_is_a_span_in_its_callers_trace_with_a_child_for_each_phase() -> None:
    recorder = Recorder()

    async def main() -> None:
        async with serving() as (service, _):
            service.observers.append(recorder.spans)
            asked = GenerateRequest(
                messages=[{"role": "user", "content": "a secret prompt"}],
                params=GREEDY,
                request_id="named",
                model="fake",
                trace_parent=SAMPLED,
                trace_state="vendor=1",
            )
            assert [delta async for delta in await service.generate(asked)]

    asyncio.run(main())
    found = recorder.take()
    assert list(found) == ["queue", "prefill", "decode", "chat fake"]
    root = found["chat fake"]
    assert root.kind is SpanKind.SERVER
    assert root.status.status_code is StatusCode.UNSET
    assert root.context is not None
    assert root.parent is not None
    assert f"{root.context.trace_id:032x}" == TRACE_ID
    assert f"{root.parent.span_id:016x}" == PARENT_ID
    assert root.context.trace_state.get("vendor") == "1"
    said = dict(root.attributes or {})
    assert said["gen_ai.operation.name"] == "chat"
    assert said["gen_ai.request.model"] == "fake"
    assert said["gen_ai.response.model"] == IDENTITY.model
    assert said["gen_ai.response.id"] == "named"
    assert said["gen_ai.response.finish_reasons"] == ("length",)
    assert said["gen_ai.usage.output_tokens"] == 12
    assert said["jaxserve.kv_format"] == IDENTITY.kv_format
    assert "secret" not in str(said)
    ends = [root.start_time, *(found[name].end_time for name in ("queue", "prefill", "decode"))]
    starts = [found[name].start_time for name in ("queue", "prefill", "decode")]
    assert starts == ends[:-1], "one phase begins where the other ends"
    assert ends == sorted(ends)  # type: ignore[type-var]
    for name in ("queue", "prefill", "decode"):
        parent = found[name].parent
        assert parent is not None
        assert parent.span_id == root.context.span_id
    (event,) = root.events
    assert event.name == "first token"


def test_names_are_the_conventions() -> None:
    record = make_record(make_output(), model="fake")
    names = {name for name in attributes(record) if name.startswith("gen_ai.")}
    assert names - VLLM <= KNOWN
    assert names >= {"gen_ai.usage.input_tokens", "gen_ai.usage.cache_read.input_tokens", *VLLM}


def test_who_samples_is_the_caller() -> None:
    recorder = Recorder()
    recorder.spans(make_record(trace_parent=UNSAMPLED))
    assert recorder.take() == {}
    recorder.spans(make_record(model="fake"))
    root = recorder.take()["text_completion fake"]
    assert root.parent is None


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (Status.INTERNAL, StatusCode.ERROR),
        (Status.CANCELLED, StatusCode.UNSET),
        (Status.INVALID_ARGUMENT, StatusCode.UNSET),
    ],
)
def test_what_failed_says_so(status: Status, code: StatusCode) -> None:
    recorder = Recorder()
    recorder.spans(make_record(error=ServiceError(status, "why"), admitted=False, model="fake"))
    (span,) = recorder.take().values()
    assert span.status.status_code is code
    assert (span.attributes or {})["error.type"] == status.value


def test_spans_are_made_only_where_they_are_wanted() -> None:
    endpoint = "http://localhost:4317"
    assert not wants_spans(None, {})
    assert wants_spans(endpoint, {})
    assert wants_spans(None, {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint})
    assert wants_spans(None, {"OTEL_TRACES_EXPORTER": "otlp"})
    assert not wants_spans(endpoint, {"OTEL_SDK_DISABLED": "true"})
    assert not wants_spans(None, {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_TRACES_EXPORTER": "none"})
    outlets = Outlets(OutletOptions(request_log="off", environ={}))
    assert outlets.observers == []
    outlets.close()


def test_a_bad_collector_is_refused() -> None:
    with pytest.raises(ValueError, match="'smoke' is unknown"):
        make_provider(None, {"OTEL_EXPORTER_OTLP_PROTOCOL": "smoke"})
    pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc")
    with pytest.raises(ValueError, match=r"'localhost:4317'.*expected such as http"):
        make_provider("localhost:4317", {})


def test_a_collector_gets_them() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc")
    import grpc
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

    received: list[Any] = []

    class Collector(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            received.append(request)
            return trace_service_pb2.ExportTraceServiceResponse()

    server = grpc.server(futures.ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Collector(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        outlets = Outlets(
            OutletOptions(request_log="off", otlp_endpoint=f"http://127.0.0.1:{port}", environ={})
        )
        (observe,) = outlets.observers
        observe(make_record(model="fake"))
        outlets.close()
    finally:
        server.stop(None)
    (resource,) = received[0].resource_spans
    about = {pair.key: pair.value.string_value for pair in resource.resource.attributes}
    assert about["service.name"] == "jaxserve"
    names = [span.name for scope in resource.scope_spans for span in scope.spans]
    assert names == ["queue", "prefill", "decode", "text_completion fake"]
