"""Prometheus metrics, under vLLM's public names where the meaning is the same."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from jaxserve.outputs import RequestOutput
from server.core import RequestRecord, Routes, Service

_FINISH_REASONS = ("stop", "length", "abort", "error")
CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
_MILLISECONDS = (1, 2.5, 5, 10, 25, 50, 75, 100, 150, 200, 300, 400, 500, 750, 1000, 2500)
_TOKEN_SECONDS = tuple(milliseconds / 1000 for milliseconds in _MILLISECONDS)
_FIRST_TOKEN_SECONDS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    10.0,
    40.0,
)
_REQUEST_SECONDS = (
    0.01,
    0.05,
    0.1,
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    20.0,
    40.0,
    60.0,
    120.0,
    480.0,
)
_TOKENS = tuple(float(2**exponent) for exponent in range(0, 21, 2))


class Metrics:
    """Those of every model that is served."""

    def __init__(self, routes: Routes) -> None:
        self._models: list[_ModelMetrics] = []
        routes.watch(lambda service: self._models.append(_ModelMetrics(service)))

    def text(self) -> bytes:
        """Everything, in Prometheus' text format."""
        return b"".join(model.text() for model in self._models)


class _ModelMetrics:
    """A registry of its own for one service: counts as they stand when read, times as requests end.

    Every label has few values: the served model's name, finish reasons, statuses.
    """

    def __init__(self, service: Service) -> None:
        self._model = service.identity.name
        self._registry = CollectorRegistry()
        self._registry.register(_ServiceCollector(service))
        self._first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "From arrival to the first token.", _FIRST_TOKEN_SECONDS
        )
        self._per_token = self._histogram(
            "vllm:request_time_per_output_token_seconds",
            "Of a request with several tokens, the mean time between two.",
            _TOKEN_SECONDS,
        )
        self._total = self._histogram(
            "vllm:e2e_request_latency_seconds", "From arrival to the end.", _REQUEST_SECONDS
        )
        self._queue = self._histogram(
            "vllm:request_queue_time_seconds", "From arrival to a slot.", _REQUEST_SECONDS
        )
        self._prefill = self._histogram(
            "vllm:request_prefill_time_seconds", "From a slot to the first token.", _REQUEST_SECONDS
        )
        self._decode = self._histogram(
            "vllm:request_decode_time_seconds", "From the first token to the end.", _REQUEST_SECONDS
        )
        self._prompt_tokens = self._histogram("vllm:request_prompt_tokens", "Of a request.", _TOKENS)
        self._answer_tokens = self._histogram(
            "vllm:request_generation_tokens", "Of a request, over its samples.", _TOKENS
        )
        service.observers.append(self.observe)

    def observe(self, record: RequestRecord) -> None:
        """Take a request that has ended into account; one without an answer counts as failed alone."""
        if record.output is None:
            return
        samples, times = record.output.outputs, record.output.metrics
        self._prompt_tokens.observe(record.num_prompt_tokens)
        self._answer_tokens.observe(sum(len(sample.token_ids) for sample in samples))
        self._total.observe(times.total_seconds)
        if times.queue_seconds is not None:
            self._queue.observe(times.queue_seconds)
        if times.scheduled_time is not None and times.first_token_time is not None:
            self._observe_answer(record.output, times.scheduled_time, times.first_token_time)

    def _observe_answer(self, output: RequestOutput, scheduled: float, first: float) -> None:
        decode = output.metrics.finish_time - first
        self._first_token.observe(first - output.metrics.arrival_time)
        self._prefill.observe(first - scheduled)
        self._decode.observe(decode)
        most = max(len(sample.token_ids) for sample in output.outputs)
        if most > 1:
            self._per_token.observe(decode / (most - 1))

    def text(self) -> bytes:
        """Everything, in Prometheus' text format."""
        return generate_latest(self._registry)

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        family = Histogram(name, text, ["model_name"], buckets=tuple(buckets), registry=self._registry)
        return family.labels(self._model)


class _ServiceCollector(Collector):
    """Reads what the service counts anyway."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        load, counts = self._service.load(), self._service.statistics
        yield self._gauge("vllm:num_requests_running", "Samples in slots.", load.num_running)
        yield self._gauge("vllm:num_requests_waiting", "Samples in the queue.", load.num_waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of the pages held; 1 is all.", load.kv_usage)
        yield self._counter("vllm:prompt_tokens", "Of answered requests.", counts.num_prompt_tokens)
        yield self._counter("vllm:generation_tokens", "Of answered requests.", counts.num_completion_tokens)
        yield self._counter("vllm:num_preemptions", "Slots given up.", counts.num_preemptions)
        finished = {reason: counts.num_finished[reason] for reason in _FINISH_REASONS}
        yield self._counters("vllm:request_success", "Answered.", "finished_reason", finished)
        refused = {status.value: count for status, count in counts.num_refused.items()}
        yield self._counters("jaxserve:request_refused", "Never admitted, by why.", "status", refused)
        failed = {status.value: count for status, count in counts.num_failed.items()}
        yield self._counters("jaxserve:request_failed", "Admitted, not answered, by why.", "status", failed)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _counters(self, name: str, text: str, label: str, values: dict[str, int]) -> Metric:
        family = CounterMetricFamily(name, text, labels=["model_name", label])
        for reason, value in values.items():
            family.add_metric([self._model, reason], value)
        return family

    @property
    def _model(self) -> str:
        return self._service.identity.name
