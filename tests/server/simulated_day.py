"""A service whose engine does what a test says, scraped and judged by alerts in simulated time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from jaxserve.loop_stats import STAGES, STEP_ROWS_BUCKETS, LoopSnapshot
from jaxserve.outputs import CompletionOutput, RequestMetrics, RequestOutput
from jaxserve.plan import SamplingParams
from jaxserve.scheduling import ClassLoad
from server.core import GenerateRequest, RequestRecord, Service, ServiceError
from server.core.statistics import StatisticsOptions
from server.core.telemetry.prometheus import Metrics
from tests.fake_model import fake_limits
from tests.server.harness import IDENTITY, TOKENIZER
from tests.server.promql import Alert
from tests.server.promql_series import Series

SCRAPE_SECONDS = 30.0
ARRIVAL = 1000.0


def make_output(
    *,
    num_tokens: int = 11,
    num_prompt: int = 20,
    num_cached: int = 4,
    queue: float = 0.01,
    ttft: float = 0.1,
    tpot: float = 0.02,
    finish_reason: Any = "length",
) -> RequestOutput:
    """An answer, with its times in seconds."""
    first = ARRIVAL + ttft
    return RequestOutput(
        request_id="x",
        prompt="a secret prompt",
        prompt_token_ids=[0] * num_prompt,
        prompt_logprobs=None,
        outputs=[
            CompletionOutput(
                index=0,
                text="a secret answer",
                token_ids=[5] * num_tokens,
                logprobs=None,
                cumulative_logprob=None,
                finish_reason=finish_reason,
                stop_reason=None,
            )
        ],
        seed=7,
        metrics=RequestMetrics(
            arrival_time=ARRIVAL,
            scheduled_time=ARRIVAL + queue,
            first_token_time=first,
            finish_time=first + tpot * (num_tokens - 1),
            num_preemptions=0,
        ),
        num_cached_tokens=num_cached,
    )


def make_record(
    output: RequestOutput | None = None,
    error: ServiceError | None = None,
    *,
    admitted: bool = True,
    **request: Any,
) -> RequestRecord:
    """The record of an answer, or of a failure or a refusal."""
    output = make_output() if output is None and error is None else output
    times = None if output is None else output.metrics
    return RequestRecord(
        request=GenerateRequest(**({"text": "a secret prompt", "params": SamplingParams()} | request)),
        request_id="x",
        admitted=admitted,
        arrival_time=ARRIVAL,
        first_token_time=None if times is None else times.first_token_time,
        end_time=ARRIVAL + 0.5 if times is None else times.finish_time,
        num_prompt_tokens=0 if output is None else len(output.prompt_token_ids),
        num_streamed=0 if output is None else sum(len(sample.token_ids) for sample in output.outputs),
        output=output,
        error=error,
        receipt=None,
    )


class ScriptedEngine:
    """As much of an engine as a service reads."""

    def __init__(self) -> None:
        self.limits = fake_limits()
        self.failure: BaseException | None = None
        self.grammars = None
        self.num_open = 0
        self.counts = LoopSnapshot(
            num_open=3,
            num_running=3,
            num_waiting=0,
            num_free_pages=(128,),
            num_steps=0,
            num_sampled=0,
            num_prompt_tokens=0,
            num_preemptions=0,
            step_rows=(0,) * (len(STEP_ROWS_BUCKETS) + 1),
            num_step_rows=0,
            stage_seconds=dict.fromkeys(STAGES, 0.0),
        )

    def snapshot(self) -> LoopSnapshot:
        return self.counts

    def class_loads(self) -> tuple[ClassLoad, ...]:
        return (ClassLoad("default", 0, 3, 0.0, 0, 0.0, 0.0),)


class World:
    """A server, what is scraped of it, and the alerts that judge it, a tick every 30 s."""

    def __init__(self, rules: Sequence[Mapping[str, Any]]) -> None:
        self.engine = ScriptedEngine()
        self.num_compiles = 0
        options = StatisticsOptions(compiles_after_ready=lambda: self.num_compiles)
        engine: Any = self.engine
        self.service = Service(IDENTITY, TOKENIZER, engine, statistics=options)
        server: Any = SimpleNamespace(services=(self.service,), calls=Counter())
        self.metrics = Metrics(server)
        self.answers_scrapes = True
        self.exists = True
        self.num_ticks = 0
        self._alerts = [Alert(rule) for rule in rules]
        self._series = Series({name for alert in self._alerts for name in alert.query.names})
        self.fired: dict[str, set[frozenset[tuple[str, str]]]] = {}
        """Label sets by alert, since the start."""

    def run(self, minutes: float, tick: Callable[[World], object]) -> set[str]:
        """Let time pass; return the alerts that fired in it."""
        fired: set[str] = set()
        for _ in range(round(minutes * 60 / SCRAPE_SECONDS)):
            self.num_ticks += 1
            tick(self)
            now = self.num_ticks * SCRAPE_SECONDS
            self._scrape(now)
            for alert in self._alerts:
                if labels := alert.firing(self._series, now):
                    fired.add(alert.name)
                    self.fired.setdefault(alert.name, set()).update(labels)
        return fired

    def answer(self, times: int = 1, *, priority: str = "", **output: Any) -> None:
        """Requests were answered."""
        for _ in range(times):
            self.service.statistics.count(make_record(make_output(**output), priority=priority))

    def fail(self, error: ServiceError, *, admitted: bool) -> None:
        """A request was not."""
        self.service.statistics.count(make_record(error=error, admitted=admitted))

    def change(self, **counts: Any) -> None:
        """The engine's next snapshot."""
        self.engine.counts = replace(self.engine.counts, **counts)

    def _scrape(self, now: float) -> None:
        if self.exists:
            text = self.metrics.text().decode() if self.answers_scrapes else None
            self._series.scrape(text, now, job="jaxserve", instance="host:8000")
        else:
            self._series.scrape("", now, job="another", instance="host:9")


def healthy(world: World) -> None:
    """What a good day looks like: a little of everything, within bounds."""
    world.answer(40)
    world.answer(10, priority="interactive", ttft=0.2)
    counts = world.engine.counts
    world.change(
        num_steps=counts.num_steps + 300,
        num_sampled=counts.num_sampled + 275,
        num_preemptions=counts.num_preemptions + (world.num_ticks % 4 == 0),
        num_waiting=world.num_ticks % 3,
        num_free_pages=(100 + world.num_ticks % 7,),
    )
