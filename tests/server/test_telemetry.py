"""What is measured: targets, histograms, labels, the page about it, and all of it over gRPC."""

from __future__ import annotations

import argparse
import asyncio
from math import inf

import pytest

from jaxserve.scheduling.classes import PriorityClass
from server.core.statistics import StatisticsOptions
from server.core.telemetry.goodput import AnswerTimes, Targets, answer_times, class_targets, read_targets
from server.core.telemetry.histogram import Histogram, token_bounds
from server.core.telemetry.labels import BoundedLabels
from server.telemetry_arguments import add_telemetry_arguments, read_outlets, read_statistics
from tests.server.simulated_day import ARRIVAL, make_output


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_telemetry_arguments(parser)
    return parser.parse_args(arguments)


def test_targets_are_spelled_as_vllm_spells_them() -> None:
    assert read_targets("ttft:500,tpot:50") == Targets(ttft=0.5, tpot=0.05)
    assert read_targets("e2el:2000.5") == Targets(e2el=2.0005)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "names no target"),
        ("ttft", "'' is no number"),
        ("ttft:soon", "'soon' is no number"),
        ("itl:5", "expected each of ttft, tpot, e2el"),
        ("ttft:1,ttft:2", "at most once"),
        ("ttft:0", r"ttft 0.0 s is no target"),
        ("tpot:nan", "no target"),
    ],
)
def test_what_is_no_target_is_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_targets(text)


def test_every_target_must_be_kept() -> None:
    targets = Targets(ttft=1.0, tpot=0.1)
    assert targets.met(AnswerTimes(1.0, 0.1, 99.0))
    assert targets.met(AnswerTimes(1.0, None, 99.0)), "one token has no time between two"
    assert not targets.met(AnswerTimes(1.1, 0.1, 2.0))
    assert not targets.met(AnswerTimes(0.1, 0.11, 2.0))
    assert not Targets(e2el=1.0).met(AnswerTimes(0.1, 0.1, 1.5))
    assert Targets().promised() == {}


def test_times_of_an_answer() -> None:
    output = make_output(num_tokens=11)
    times = answer_times(output, ARRIVAL, ARRIVAL + 0.5, ARRIVAL + 1.5)
    assert (times.ttft, times.tpot, times.e2el) == (0.5, 0.1, 1.5)
    assert answer_times(make_output(num_tokens=1), ARRIVAL, ARRIVAL + 0.5, ARRIVAL + 0.5).tpot is None
    assert answer_times(output, ARRIVAL, None, ARRIVAL + 1.5) == AnswerTimes(None, None, 1.5)


def test_a_class_promises_what_it_aims_at() -> None:
    classes = (PriorityClass(name="a", ttft_target=1.0, tpot_target=inf), PriorityClass(name="b"))
    assert class_targets(classes) == {"a": Targets(ttft=1.0), "b": Targets()}
    assert StatisticsOptions().class_targets["interactive"].promised()


def test_a_histogram_counts_up_to_each_bound() -> None:
    histogram = Histogram((1.0, 2.5))
    for value in (0.5, 1.0, 1.5, 99.0):
        histogram.observe(value)
    assert histogram.cumulative() == [("1.0", 2.0), ("2.5", 3.0), ("+Inf", 4.0)]
    assert (histogram.count, histogram.total) == (4, 102.0)
    for bounds in ((), (2.0, 1.0), (1.0, 1.0)):
        with pytest.raises(ValueError, match="do not ascend"):
            Histogram(bounds)
    assert token_bounds(100) == (1, 2, 5, 10, 20, 50, 100)
    assert token_bounds(0) == (1,)


def test_labels_are_few() -> None:
    labels = BoundedLabels(2)
    assert [labels.label(name) for name in ("a", "b", "c", "a", "")] == ["a", "b", "other", "a", "none"]
    assert BoundedLabels(1).label("x", learn=False) == "other"
    assert BoundedLabels(0).label("x") == "other"
    with pytest.raises(ValueError, match="-1 names"):
        BoundedLabels(-1)


def test_arguments() -> None:
    assert read_outlets(parse()).request_log == "-"
    asked = read_outlets(parse("--request-log", "off", "--otlp-endpoint", "http://x:1"))
    assert (asked.request_log, asked.otlp_endpoint) == ("off", "http://x:1")
    assert read_statistics(parse()).class_targets == StatisticsOptions().class_targets
    options = read_statistics(parse("--goodput", "ttft:500", "--metrics-tenants", "3"))
    assert (options.targets, options.class_targets, options.max_tenants) == (Targets(ttft=0.5), {}, 3)
    with pytest.raises(ValueError, match="--metrics-tenants -1"):
        read_statistics(parse("--metrics-tenants", "-1"))
    with pytest.raises(ValueError, match="goodput"):
        read_statistics(parse("--goodput", "fast"))


def test_the_page_about_metrics_is_current() -> None:
    pytest.importorskip("prometheus_client")
    from server.core.telemetry.table import PAGE, page

    assert PAGE.read_text() == page(), "python -m server.core.telemetry.table"


def test_grpc_counts_its_calls_and_gives_the_metrics() -> None:
    pytest.importorskip("grpc")
    pytest.importorskip("smg_grpc_proto")
    from server.proto.jaxserve.v1 import engine_pb2 as pb
    from tests.server.grpc_harness import failure, grpc_serving

    async def main() -> None:
        async with grpc_serving() as served:
            params = pb.SamplingParams(max_tokens=3, ignore_eos=True)
            assert [r async for r in served.native.Generate(pb.GenerateRequest(text="x", params=params))]
            await failure(served.native.Generate(pb.GenerateRequest(text="x", model="other")))
            malformed = served.channel.unary_unary("/jaxserve.v1.Engine/GetLoad")
            await failure(malformed(b"\xff\xff"))
            await failure(served.channel.unary_unary("/jaxserve.v1.Engine/Nonsense")(b""))
            stats = await served.native.GetStats(pb.GetStatsRequest(with_metrics=True))
            assert not (await served.native.GetStats(pb.GetStatsRequest())).HasField("metrics")
        lines = stats.metrics.splitlines()
        assert 'vllm:generation_tokens_total{model_name="fake"} 3.0' in lines
        calls = sorted(line for line in lines if line.startswith("jaxserve:door_responses_total{"))
        assert calls == [
            f'jaxserve:door_responses_total{{call="jaxserve.v1.Engine/{call}",code="{code}",door="grpc"}} 1.0'
            for call, code in (
                ("Generate", "not_found"),
                ("Generate", "ok"),
                ("GetLoad", "invalid_argument"),
            )
        ]

    asyncio.run(main())
