"""Rules about techniques that a benchmark was repeated without: what did they bring?"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

from jaxserve.planning.advice.benchmark_results import BenchmarkRun, same_load
from jaxserve.planning.advice.evidence import Evidence, Technique
from jaxserve.planning.advice.finding import Advice, Question, Rule, Setting
from jaxserve.planning.advice.missing import NotMeasured
from jaxserve.planning.advice.thresholds import NO_GAIN, STALLED

_Pair = tuple[BenchmarkRun, BenchmarkRun]
_Gain = Callable[[BenchmarkRun, BenchmarkRun], float | None]


def _rate(run: BenchmarkRun, other: BenchmarkRun) -> float | None:
    return run.output_rate / other.output_rate if other.output_rate else None


def _tpot(run: BenchmarkRun, other: BenchmarkRun) -> float | None:
    return other.tpot_p50 / run.tpot_p50 if run.tpot_p50 else None


def _tail(run: BenchmarkRun, other: BenchmarkRun) -> float | None:
    return other.itl_p99 / run.itl_p99 if run.itl_p99 else None


def _goodput(run: BenchmarkRun, other: BenchmarkRun) -> float | None:
    return run.goodput / other.goodput if run.goodput is not None and other.goodput else None


_SPEED: Mapping[str, _Gain] = {"tokens a second": _rate, "time per token": _tpot}
_EVENNESS: Mapping[str, _Gain] = {"tokens a second": _rate, "longest gaps": _tail, "goodput": _goodput}


def _without_gain(seen: Evidence, technique: Technique, measures: Mapping[str, _Gain]) -> list[str] | None:
    """How much better each measure is with a technique than without, pair by pair; None if any is better by
    enough, in the median over the loads."""
    pairs = list(same_load(seen.runs, seen.without(technique)))
    if not pairs:
        raise NotMeasured(
            f"a benchmark of the same load with {technique} and without: rate, prompts and tokens differ"
        )
    gains = {name: _gains(pairs, gain) for name, gain in measures.items()}
    gains = {name: values for name, values in gains.items() if values}
    if any(statistics.median(values) >= NO_GAIN for values in gains.values()):
        return None
    return [
        f"{name}: {', '.join(f'{value:.2f}' for value in values)} times as good with {technique} as without"
        for name, values in gains.items()
    ] + [f"loads: {', '.join(run.label for run, _ in pairs)}"]


def _gains(pairs: Sequence[_Pair], gain: _Gain) -> list[float]:
    return [value for value in (gain(*pair) for pair in pairs) if value is not None]


def speculation_without_gain(seen: Evidence) -> Advice | None:
    """Answers come no sooner with drafts than without."""
    found = _without_gain(seen, "speculation", _SPEED)
    if found is None:
        return None
    return Advice(
        technique="decode without drafts",
        evidence=tuple(found),
        trade_off="texts that repeat themselves (code, summaries, quotes) would lose what drafts bring them",
        settings=(Setting("option", "--speculative"),),
        watch=("vllm:request_time_per_output_token_seconds", "vllm:spec_decode_num_accepted_tokens_total"),
    )


def quantization_without_gain(seen: Evidence) -> Advice | None:
    """A lower precision that is no quicker: weights that are widened again at each step save memory alone."""
    found = _without_gain(seen, "quantization", _SPEED)
    if found is None:
        return None
    precision = "" if seen.known_server is None else seen.known_server.precision
    # On CPU the int8 recipe has a kernel of its own; the others save memory there, not time.
    keeps_saving = seen.known_server is not None and seen.known_server.device.startswith("cpu")
    other = keeps_saving and not precision.startswith(("int8@", "w8a8@"))
    return Advice(
        technique="a precision that pays",
        evidence=(*found, *((f"weights are {precision}",) if precision else ())),
        trade_off="weights take more memory, which the pool lacks then; answers are of the wider precision",
        settings=(Setting("option", "--quantize", "int8" if other else None),),
        watch=("vllm:request_time_per_output_token_seconds", "jaxserve:model_info"),
    )


def disaggregation_is_worse(seen: Evidence) -> Advice | None:
    """Prefill and decode apart bring neither more tokens, nor more answers in time, nor shorter gaps."""
    found = _without_gain(seen, "disaggregation", _EVENNESS)
    if found is None:
        return None
    return Advice(
        technique="prefill and decode in one engine, kept apart by a target",
        evidence=tuple(found),
        trade_off="prompts and answers share steps again, so a burst of prompts is felt, within the target",
        settings=(
            Setting("option", "--prefill-mesh"),
            Setting("policy", "classes.default.tpot_target", STALLED * max(seen.runs[0].tpot_p50, 1e-3)),
        ),
        watch=("vllm:inter_token_latency_seconds", "jaxserve:goodput_requests_total"),
    )


RULES = (
    Rule("speculation-without-gain", Question.LATENCY, speculation_without_gain),
    Rule("quantization-without-gain", Question.LATENCY, quantization_without_gain),
    Rule("disaggregation-worse", Question.FIGHT, disaggregation_is_worse),
)
