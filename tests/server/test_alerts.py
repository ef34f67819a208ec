"""The alert rules: each fires on what it is for and on little else, and none on a good day."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("prometheus_client")
yaml = pytest.importorskip("yaml")

from server.core import ServiceError, Status  # noqa: E402
from tests.server.promql import Alert, Query  # noqa: E402
from tests.server.promql_series import Series  # noqa: E402
from tests.server.simulated_day import World, healthy  # noqa: E402

FILE = Path(__file__).resolve().parents[2] / "server" / "alerts" / "jaxserve.rules.yml"
RULES: list[dict[str, Any]] = [
    rule for group in yaml.safe_load(FILE.read_text())["groups"] for rule in group["rules"]
]
BY_PROMETHEUS = {"up"}
"""Series that Prometheus itself writes."""


def engine_down(world: World) -> None:
    healthy(world)
    world.engine.failure = RuntimeError("the device has gone")


def no_answer(world: World) -> None:
    world.answers_scrapes = False


def nobody_there(world: World) -> None:
    world.exists = False


def queue_grows(world: World) -> None:
    healthy(world)
    world.change(num_waiting=2 * world.num_ticks)


def first_tokens_late(world: World) -> None:
    healthy(world)
    world.answer(60, priority="interactive", ttft=3.0)


def tokens_slow(world: World) -> None:
    healthy(world)
    world.answer(60, priority="interactive", tpot=0.3)


def failing(world: World) -> None:
    healthy(world)
    world.fail(ServiceError(Status.DEADLINE_EXCEEDED, "late"), admitted=True)
    for _ in range(7):
        world.fail(ServiceError(Status.INTERNAL, "broken"), admitted=True)


def pool_full(world: World) -> None:
    healthy(world)
    world.change(num_free_pages=(3,), num_waiting=2 + world.num_ticks % 3)


def preempting(world: World) -> None:
    healthy(world)
    world.change(num_preemptions=world.engine.counts.num_preemptions + 4)


def compiling(world: World) -> None:
    healthy(world)
    world.num_compiles += world.num_ticks % 20 == 0


def rejecting(world: World) -> None:
    healthy(world)
    for _ in range(8):
        error = ServiceError(Status.RESOURCE_EXHAUSTED, "full", 1.0, reason="queue_full")
        world.fail(error, admitted=False)


SCENARIOS: dict[Callable[[World], object], set[str]] = {
    engine_down: {"JaxserveEngineDown"},
    no_answer: {"JaxserveEngineDown", "JaxserveAbsent"},
    nobody_there: {"JaxserveAbsent"},
    failing: {"JaxserveRequestsFail", "JaxserveGoodputLow"},
    queue_grows: {"JaxserveQueueGrows"},
    rejecting: {"JaxserveAdmissionRejects"},
    pool_full: {"JaxserveKvPressure"},
    preempting: {"JaxservePreempts"},
    first_tokens_late: {"JaxserveFirstTokenLate", "JaxserveGoodputLow"},
    tokens_slow: {"JaxserveTokensSlow", "JaxserveGoodputLow"},
    compiling: {"JaxserveCompilesWhileServing"},
}
"""What fires, and nothing else does."""


def test_a_good_day_is_silent() -> None:
    assert World(RULES).run(40, healthy) == set()


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_trouble_fires_what_is_for_it(scenario: Callable[[World], object]) -> None:
    world = World(RULES)
    assert world.run(12, healthy) == set()
    assert world.run(18, scenario) == SCENARIOS[scenario]
    for name, label_sets in world.fired.items():
        (alert,) = (alert for alert in map(Alert, RULES) if alert.name == name)
        for said in alert.annotations.values():
            for label in re.findall(r"\$labels\.(\w+)", said):
                assert all(label in dict(labels) for labels in label_sets), f"{name} lacks {label}"


def test_every_rule_has_a_scenario() -> None:
    assert {rule["alert"] for rule in RULES} == set().union(*SCENARIOS.values())
    assert len(RULES) == len({rule["alert"] for rule in RULES})


def test_trouble_that_passes_is_over() -> None:
    world = World(RULES)
    assert world.run(10, pool_full) == {"JaxserveKvPressure"}
    world.run(2, healthy)
    assert world.run(10, healthy) == set()


def test_a_blip_is_no_alert() -> None:
    world = World(RULES)
    world.run(10, healthy)
    assert world.run(3, pool_full) | world.run(10, healthy) == set()


def test_every_metric_of_a_rule_is_exposed() -> None:
    text = World(RULES).metrics.text().decode()
    exposed = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    for rule in RULES:
        for name in Query(rule["expr"]).names - BY_PROMETHEUS:
            assert name.removesuffix("_bucket") in exposed, f"{rule['alert']} reads {name}"


def test_every_rule_says_what_it_is_about() -> None:
    for rule in RULES:
        assert set(rule["annotations"]) == {"summary", "description"}
        assert rule["labels"]["severity"] in ("critical", "warning")


# The language that judges the rules ------------------------------------------------------------------------


def scraped(*values: float | None, name: str = "c_total", every: float = 10.0) -> Series:
    """One series, scraped every 10 s from 10 on; None for a scrape without it."""
    series = Series()
    for index, value in enumerate(values, start=1):
        text = "" if value is None else f'# TYPE {name} gauge\n{name}{{a="1"}} {value}\n'
        series.scrape(text, index * every, job="j")
    return series


def only(value: Any) -> float:
    (number,) = value.values()
    return number


def test_rates_are_extrapolated_and_survive_a_reset() -> None:
    at = 60.0
    assert only(Query("rate(c_total[1m])").evaluate(scraped(0, 10, 20, 30, 40, 50), at)) == pytest.approx(
        50 / 60
    )
    assert only(Query("increase(c_total[1m])").evaluate(scraped(5, 15, 25, 3, 13, 23), at)) == pytest.approx(
        43 * (50 + 50 * 5 / 43) / 50
    )
    assert Query("rate(c_total[1m])").evaluate(scraped(None, None, None, None, None, 7), at) == {}


def test_a_series_that_is_gone_is_gone() -> None:
    series = scraped(1, 2, None)
    assert only(Query("c_total").evaluate(series, 20)) == 2
    assert Query("c_total").evaluate(series, 30) == {}
    assert only(Query("absent(c_total)").evaluate(series, 30)) == 1
    assert Query("absent(c_total)").evaluate(series, 20) == {}
    assert only(Query('up{job="j"}').evaluate(series, 30)) == 1
    assert Query("c_total").evaluate(scraped(1), 400) == {}, "too old"


def test_operators_and_selectors() -> None:
    series = scraped(4, 6, 8)
    for text, wanted in (
        ("c_total * 2 + 1", 17.0),
        ("(c_total - 2) / (c_total - 8)", float("inf")),
        ('c_total{a=~"1|2"} > 7', 8.0),
        ("c_total and up", None),
        ("c_total unless c_total > 9", 8.0),
        ("min_over_time(c_total[30s])", 4.0),
        ("max_over_time(c_total[15s])", 8.0),
        ("deriv(c_total[30s])", 0.2),
        ('sum by (job) (c_total) == 8 or c_total{a!~"1"}', 8.0),
    ):
        found = Query(text).evaluate(series, 30)
        assert isinstance(found, dict), text
        assert list(found.values()) == ([] if wanted is None else [pytest.approx(wanted)]), text


def test_quantiles_are_linear_within_a_bucket() -> None:
    series = Series()
    lines = "".join(f'h_bucket{{le="{le}"}} {n}\n' for le, n in (("1.0", 10), ("2.0", 30), ("+Inf", 40)))
    series.scrape(f"# TYPE h histogram\n{lines}h_sum 1\nh_count 40\n", 10)
    for quantile, wanted in ((0.5, 1.5), (0.25, 1.0), (0.1, 0.4), (0.99, 2.0)):
        found = Query(f"histogram_quantile({quantile}, h_bucket)").evaluate(series, 10)
        assert only(found) == pytest.approx(wanted)


@pytest.mark.parametrize(
    "text", ["avg(c)", "quantile_over_time(0.5, c[5m])", "c[5m]", "c >", "c > on (a) d", "c offset 5m", "c $"]
)
def test_what_is_not_known_is_not_guessed(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape("c")):
        Query(text)
