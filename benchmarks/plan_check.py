"""Does `jaxserve plan --target cpu` foretell what this machine does? `python -m benchmarks.plan_check`

Plans a model on this CPU for a few requests at once, from a calibration that times single steps on random
numbers and serves nothing (`jaxserve.calibration`), then serves the same requests with `LLM`. Prints
prediction, measurement (the best of several runs) and their ratio. Greedy, prompts and answers of fixed
length, nothing reused. Exit status 1 if a ratio is further from 1 than the tolerance.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.machine import describe
from benchmarks.offline import prompt
from jaxserve import LLM, SamplingParams
from jaxserve.calibration import Calibration
from jaxserve.planning.capacity import serve_at_once
from jaxserve.planning.models import find_model
from jaxserve.planning.plan_records import Candidate, Sizes
from jaxserve.planning.planner import make_engine
from jaxserve.planning.precision import find_precision
from jaxserve.planning.report import Target
from jaxserve.planning.workload import Lengths, Workload

CONCURRENCY = (1, 4, 16)
PRECISIONS = ("float32", "int8")
TOLERANCE = 0.25


@dataclass(frozen=True)
class Figures:
    """What some requests at once came to."""

    output_rate: float
    """Answers' tokens a second, from the start to the last one's end."""
    ttft: float
    """Mean seconds to the first token."""
    tpot: float
    """Mean seconds for each token after it."""


@dataclass
class Report:
    """Everything that one run found."""

    machine: str
    model: str
    prompt_len: int
    answer_len: int
    bandwidth: float = 0.0
    """Bytes a second, as calibrated."""
    flops: dict[str, float] = field(default_factory=dict)
    predicted: dict[str, Figures] = field(default_factory=dict)
    """By precision and number of requests."""
    measured: dict[str, Figures] = field(default_factory=dict)

    def ratio(self, case: str, figure: str) -> float:
        """Predicted by measured."""
        return getattr(self.predicted[case], figure) / getattr(self.measured[case], figure)


def predict(candidate: Candidate, sizes: Sizes, lengths: tuple[int, int], count: int) -> Figures:
    """What the planner says of so many requests at once."""
    workload = Workload(
        prompt=Lengths(mean=lengths[0], p95=lengths[0]), output=Lengths(mean=lengths[1], p95=lengths[1])
    )
    trace = workload.trace(count, longest=sizes.max_model_len)
    outcome = serve_at_once(make_engine(candidate, sizes), trace, Target(), 1.0).saturated
    records = outcome.simulation.records
    return Figures(
        outcome.summary.output_tokens_per_second, float(records.ttft.mean()), float(records.tpot.mean())
    )


def measure(llm: LLM, lengths: tuple[int, int], count: int, repeats: int) -> Figures:
    """The same requests on the engine, as quick as they went."""
    prompts = [prompt(number, lengths[0]) for number in range(count)]
    params = SamplingParams(temperature=0.0, max_tokens=lengths[1], ignore_eos=True)
    runs: list[Figures] = []
    for _ in range(repeats):
        started = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        first = [output.metrics.first_token_seconds or 0.0 for output in outputs]
        whole = [output.metrics.finish_time - output.metrics.arrival_time for output in outputs]
        each = [(end - begin) / (lengths[1] - 1) for end, begin in zip(whole, first, strict=True)]
        runs.append(Figures(count * lengths[1] / seconds, statistics.fmean(first), statistics.fmean(each)))
    return max(runs, key=lambda run: run.output_rate)


def check(args: argparse.Namespace) -> Report:
    """Calibrate, plan and serve, one precision after the other."""
    lengths = (args.prompt_len, args.answer_len)
    report = Report(describe(), args.model, *lengths)
    sizes = Sizes(num_slots=max(CONCURRENCY), max_chunk=256, max_model_len=1024)
    calibration = Calibration(find_model(args.model), sizes)
    report.bandwidth, report.flops = calibration.chip.memory_bandwidth, dict(calibration.chip.flops)
    for name in args.precision.split(","):
        precision = find_precision(name)
        candidate = Candidate(precision=precision, cost=calibration.cost(precision), others="float32")
        settings = {"num_slots": sizes.num_slots, "max_model_len": sizes.max_model_len}
        with LLM(args.model, quantize=precision.recipe, prefix_caching=False, **settings) as llm:
            for count in CONCURRENCY:
                case = f"{name}, {count} at once"
                report.predicted[case] = predict(candidate, sizes, lengths, count)
                report.measured[case] = measure(llm, lengths, count, args.repeats)
    return report


def print_report(report: Report) -> float:
    """Returns the largest distance of a ratio from 1."""
    print(f"machine    {report.machine}")
    print(f"model      {report.model}, prompts of {report.prompt_len}, answers of {report.answer_len} tokens")
    flops = ", ".join(f"{value / 1e9:.0f} GFLOP/s {name}" for name, value in report.flops.items())
    print(f"calibrated {report.bandwidth / 1e9:.1f} GB/s, {flops}")
    columns = (("output_rate", "tokens/s", 1.0), ("ttft", "TTFT ms", 1e3), ("tpot", "TPOT ms", 1e3))
    print(f"{'':<20}" + "".join(f"{name:>12}{'measured':>10}{'ratio':>7}" for _, name, _ in columns))
    worst = 0.0
    for case, predicted in report.predicted.items():
        line = f"{case:<20}"
        for figure, _, unit in columns:
            ratio = report.ratio(case, figure)
            worst = max(worst, abs(ratio - 1))
            values = unit * getattr(predicted, figure), unit * getattr(report.measured[case], figure)
            line += f"{values[0]:>12.1f}{values[1]:>10.1f}{ratio:>7.2f}"
        print(line)
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--precision", default=",".join(PRECISIONS))
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--answer-len", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=2, help="runs of each measurement; the best counts")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    report = check(args)
    worst = print_report(report)
    if args.json:
        args.json.write_text(json.dumps(asdict(report), indent=1) + "\n")
    if worst > TOLERANCE:
        sys.exit(f"benchmarks.plan_check: a prediction is off by {worst:.0%}, more than {TOLERANCE:.0%}")


if __name__ == "__main__":
    main()
