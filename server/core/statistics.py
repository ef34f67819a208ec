"""What a service counts over its life; Prometheus and GetStats are two views of it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from jaxserve.outputs import RequestOutput
from jaxserve.scheduling.classes import DEFAULT_CLASSES
from server.core.errors import ServiceError, Status
from server.core.requests import DEFAULT_CLASS, RequestRecord
from server.core.telemetry import histogram
from server.core.telemetry.goodput import AnswerTimes, Targets, answer_times, class_targets
from server.core.telemetry.histogram import Histogram
from server.core.telemetry.labels import BoundedLabels
from server.core.telemetry.watch import StreamWatch

_MOST_CLASSES = 16
_MOST_REASONS = 32
_BLAMELESS = frozenset({Status.CANCELLED, Status.INVALID_ARGUMENT})
"""Ends of an admitted request that say nothing of how well it was served."""


@dataclass(frozen=True, kw_only=True)
class StatisticsOptions:
    """What an operator may choose about measuring."""

    targets: Targets = field(default_factory=Targets)
    """Of a class that has none of its own."""
    class_targets: Mapping[str, Targets] = field(default_factory=lambda: class_targets(DEFAULT_CLASSES))
    """By priority class."""
    max_tenants: int = 32
    """That are counted by name; the rest is counted as "other", all of them for 0."""
    compiles_after_ready: Callable[[], int] = lambda: 0
    """How many programs have been compiled while the model was served."""


class Latencies:
    """Histograms over requests, in seconds, tokens or samples; see the metrics' table."""

    def __init__(self, max_model_len: int) -> None:
        tokens = histogram.token_bounds(max_model_len)
        self.first_token = Histogram(histogram.FIRST_TOKEN_SECONDS)
        self.inter_token = Histogram(histogram.TOKEN_SECONDS)
        self.per_token = Histogram(histogram.TOKEN_SECONDS)
        self.total = Histogram(histogram.REQUEST_SECONDS)
        self.queue = Histogram(histogram.REQUEST_SECONDS)
        self.prefill = Histogram(histogram.REQUEST_SECONDS)
        self.decode = Histogram(histogram.REQUEST_SECONDS)
        self.inference = Histogram(histogram.REQUEST_SECONDS)
        self.prompt_tokens = Histogram(tokens)
        self.computed_tokens = Histogram(tokens)
        self.answer_tokens = Histogram(tokens)
        self.max_tokens = Histogram(tokens)
        self.num_samples = Histogram(histogram.SAMPLES)

    def observe(self, record: RequestRecord, output: RequestOutput) -> None:
        """Take an answered request into account. The times of its tokens were taken as they passed."""
        metrics, params = output.metrics, record.request.params
        self.prompt_tokens.observe(record.num_prompt_tokens)
        self.computed_tokens.observe(record.num_prompt_tokens - output.num_cached_tokens)
        self.answer_tokens.observe(sum(len(sample.token_ids) for sample in output.outputs))
        if params.max_tokens is not None and not record.request.until_full:  # else nobody named a number
            self.max_tokens.observe(params.max_tokens)
        self.num_samples.observe(params.n)
        self.total.observe(record.end_time - record.arrival_time)
        if metrics.scheduled_time is None:
            return
        self.queue.observe(metrics.scheduled_time - metrics.arrival_time)
        self.inference.observe(metrics.finish_time - metrics.scheduled_time)
        if metrics.first_token_time is not None:
            self.prefill.observe(metrics.first_token_time - metrics.scheduled_time)
            self.decode.observe(metrics.finish_time - metrics.first_token_time)


class ClassStatistics:
    """How one priority class was served."""

    def __init__(self, targets: Targets) -> None:
        self.targets = targets
        self.first_token = Histogram(histogram.FIRST_TOKEN_SECONDS)
        self.per_token = Histogram(histogram.TOKEN_SECONDS)
        self.num_judged = 0
        """Requests that were held against the targets."""
        self.num_good = 0
        """Of those, the ones that kept them."""
        self.num_good_tokens = 0
        """Sampled tokens of the latter."""

    def observe(self, times: AnswerTimes, num_tokens: int) -> None:
        """Take an answered request into account."""
        if times.ttft is not None:
            self.first_token.observe(times.ttft)
        if times.tpot is not None:
            self.per_token.observe(times.tpot)
        if self.targets.promised():
            self.num_judged += 1
            if self.targets.met(times):
                self.num_good += 1
                self.num_good_tokens += num_tokens

    def miss(self) -> None:
        """A request ended without its answer."""
        if self.targets.promised():
            self.num_judged += 1


class Statistics:
    """Everything counts up from the start of the service, and is counted in the service's event loop."""

    def __init__(self, max_model_len: int, options: StatisticsOptions | None = None) -> None:
        """max_model_len: longest sequence in tokens."""
        self.options = options or StatisticsOptions()
        self.latencies = Latencies(max_model_len)
        self.classes: dict[str, ClassStatistics] = {}
        """By priority class, for those that had a request."""
        self.num_admitted = 0
        self.num_refused: Counter[Status] = Counter()
        """Requests that were never admitted, by why."""
        self.num_rejected: Counter[str] = Counter()
        """Of those, the ones that there was no room for, by what was full."""
        self.num_finished: Counter[str] = Counter()
        """Answered requests, by the finish reason of their first sample."""
        self.num_failed: Counter[Status] = Counter()
        """Admitted requests without an answer, by why."""
        self.num_prompt_tokens = 0
        """Of answered requests."""
        self.num_completion_tokens = 0
        self.num_cached_tokens = 0
        """Of the prompt tokens, those that were found in the prefix cache."""
        self.num_preemptions = 0
        self.num_requests: Counter[tuple[str, str, str]] = Counter()
        """Requests that have ended or were refused, by class, tenant and outcome."""
        self.num_tokens: Counter[tuple[str, str]] = Counter()
        """Tokens of admitted requests that have ended, by tenant and kind: prompt, cached, generated."""
        self._class_labels = BoundedLabels(_MOST_CLASSES)
        self._tenant_labels = BoundedLabels(self.options.max_tenants)
        self._reason_labels = BoundedLabels(_MOST_REASONS)
        for name in (DEFAULT_CLASS, *self.options.class_targets):
            self._class(name)

    def watch(self, arrival_time: float, num_samples: int) -> StreamWatch:
        """Count an admitted request and watch over its stream."""
        self.num_admitted += 1
        return StreamWatch(arrival_time, num_samples, self.latencies.first_token, self.latencies.inter_token)

    def count(self, record: RequestRecord) -> None:
        """A request has ended, or was refused."""
        # Whoever is refused may have made a name up.
        tenant = self._tenant_labels.label(record.request.tenant, learn=record.admitted)
        class_name = self._class_labels.label(record.request.priority_class, learn=record.admitted)
        self.num_requests[class_name, tenant, record.outcome] += 1
        if not record.admitted:
            assert record.error is not None, "a refusal has a reason"
            self._count_refusal(record.error)
            return
        self.num_tokens[tenant, "prompt"] += record.num_prompt_tokens
        self.num_tokens[tenant, "generated"] += record.num_streamed
        if record.output is not None:
            self.num_tokens[tenant, "cached"] += record.output.num_cached_tokens
            self._count_answer(record, record.output, self._class(class_name))
        elif record.error is not None:
            self.num_failed[record.error.status] += 1
            if record.error.status not in _BLAMELESS:
                self._class(class_name).miss()

    def _count_refusal(self, error: ServiceError) -> None:
        self.num_refused[error.status] += 1
        if error.reason:
            self.num_rejected[self._reason_labels.label(error.reason)] += 1

    def _count_answer(self, record: RequestRecord, output: RequestOutput, own: ClassStatistics) -> None:
        reason = output.outputs[0].finish_reason
        num_tokens = sum(len(sample.token_ids) for sample in output.outputs)
        self.num_finished[reason] += 1
        self.num_prompt_tokens += len(output.prompt_token_ids)
        self.num_completion_tokens += num_tokens
        self.num_cached_tokens += output.num_cached_tokens
        self.num_preemptions += output.metrics.num_preemptions
        if reason == "abort":
            return  # Its times say when somebody lost interest.
        self.latencies.observe(record, output)
        times = answer_times(output, record.arrival_time, record.first_token_time, record.end_time)
        if times.tpot is not None:
            self.latencies.per_token.observe(times.tpot)
        own.observe(times, num_tokens)

    def _class(self, name: str) -> ClassStatistics:
        label = self._class_labels.label(name)
        found = self.classes.get(label)
        if found is None:
            targets = self.options.class_targets.get(label, self.options.targets)
            found = self.classes[label] = ClassStatistics(targets)
        return found


class RateMeter:
    """Turns a total that only grows into a rate a second, over at least `window` seconds where it can."""

    def __init__(self, *, window: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._window = window
        self._clock = clock
        self._since = (clock(), 0)
        self._rate = 0.0

    def read(self, total: int) -> float:
        """The rate until now, given the total by now."""
        now = self._clock()
        since, before = self._since
        if now - since >= self._window:
            self._rate = (total - before) / (now - since)
            self._since = (now, total)
        return self._rate
