"""Rules about the time for each token, and about prompts that get in its way."""

from __future__ import annotations

import math

from jaxserve.planning.advice.benchmark_results import BenchmarkRun
from jaxserve.planning.advice.evidence import Evidence
from jaxserve.planning.advice.finding import Advice, Question, Rule, Setting
from jaxserve.planning.advice.missing import NotMeasured
from jaxserve.planning.advice.server_window import ServerWindow
from jaxserve.planning.advice.thresholds import ENOUGH_DRAFTS, EVEN, LARGE_BATCH, LONG_GAPS, STALLED

_TPOT = ("vllm:request_time_per_output_token_seconds", "vllm:inter_token_latency_seconds")
NO_LIMIT = "a limit: --tpot-limit MS, or a tpot_target of the class that is served"


def limit_in_force(seen: Evidence) -> float | None:
    """Seconds for each token that are to be kept: what was asked for, or the server's main class aims at."""
    if seen.limits.tpot is not None or seen.known_server is None:
        return seen.limits.tpot
    return seen.known_server.tpot_target


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


def _limit(seen: Evidence) -> float:
    limit = limit_in_force(seen)
    if limit is None:
        raise NotMeasured(NO_LIMIT)
    return limit


def batch_past_the_limit(seen: Evidence) -> Advice | None:
    """Tokens come later than the limit while many answers share a step."""
    limit, server = _limit(seen), seen.server
    slow = server.tpot.quantile(0.95)
    if slow <= limit or server.batch < LARGE_BATCH:
        return None
    measured = server.decode_seconds
    largest = max((rows for rows, seconds in measured.items() if seconds <= limit), default=1)
    if measured.get(largest, math.inf) <= limit:
        found = (
            f"of steps that only decode, {largest} answers are the most within it: {_ms(measured[largest])}"
        )
    else:
        found = f"the smallest step that only decodes takes {_ms(min(measured.values()))}, which is beyond it"
    return Advice(
        technique="the largest batch within the limit",
        evidence=(
            f"a token takes {_ms(slow)} at the 95th percentile; the limit is {_ms(limit)}",
            f"a step moved {server.batch:.1f} answers on in the mean",
            found,
        ),
        trade_off="fewer answers side by side, so fewer tokens a second in all, and others wait longer",
        settings=(
            Setting("policy", f"classes.{server.main_class}.tpot_target", limit),
            Setting("option", "--num-slots", str(min(largest, server.num_slots))),
        ),
        watch=(*_TPOT, "jaxserve:decode_step_seconds_total"),
    )


def load_past_the_limit(seen: Evidence) -> Advice | None:
    """The same, in a benchmark: the largest of its loads that keeps the limit."""
    if seen.limits.tpot is None:
        raise NotMeasured("a limit: --tpot-limit MS")
    limit, runs = seen.limits.tpot, sorted(seen.runs, key=lambda run: run.concurrency)
    late = [run for run in runs if run.tpot_p99 > limit and run.concurrency >= LARGE_BATCH]
    if not late:
        return None
    kept = [run for run in runs if run.tpot_p99 <= limit]
    best = max((run.concurrency for run in kept), default=1)
    return Advice(
        technique="the largest batch within the limit",
        evidence=(
            f"the limit is {_ms(limit)} a token; at the 99th percentile there were "
            + ", ".join(f"{_ms(run.tpot_p99)} with {run.concurrency} at once" for run in runs),
            f"the most that kept it were {best} at once"
            if kept
            else f"none of the {len(runs)} loads that were tried kept it",
        ),
        trade_off=_rates(late[-1], kept[-1] if kept else None),
        settings=(
            Setting("option", "--num-slots", str(best)),
            Setting("policy", "classes.default.tpot_target", limit),
        ),
        watch=_TPOT,
    )


def _rates(late: BenchmarkRun, kept: BenchmarkRun | None) -> str:
    if kept is None:
        return "fewer answers side by side, so fewer tokens a second in all"
    return (
        f"{kept.output_rate:.1f} tokens a second in all instead of {late.output_rate:.1f}; others wait longer"
    )


def one_answer_is_too_slow(seen: Evidence) -> Advice | None:
    """Tokens come later than the limit though answers are nearly alone: a smaller batch is no way out."""
    limit, server = _limit(seen), seen.server
    median = server.tpot.quantile(0.5)
    if median <= limit or server.batch >= LARGE_BATCH:
        return None
    settings = _quicker_steps(server)
    if not settings:
        return None
    return Advice(
        technique="fewer bytes a step" if settings[0].name == "--quantize" else "several tokens a step",
        evidence=(
            f"time per token is {_ms(median)} in the median; the limit is {_ms(limit)}",
            f"a step moved only {server.batch:.1f} answers on in the mean, so it reads weights for few",
            f"weights are {server.precision}, on {server.device}",
        ),
        trade_off="a lower precision changes answers: hold it to floors by `jaxserve evaluate`; drafts "
        "change none, and cost time where texts do not repeat themselves",
        settings=settings,
        watch=(*_TPOT, "jaxserve:spec_decode_seconds_total", "jaxserve:spec_decode_plain_seconds_total"),
    )


def _quicker_steps(server: ServerWindow) -> tuple[Setting, ...]:
    """What makes a step of few rows bring tokens sooner, and is not in force."""
    # A label of a recipe has its version: int8@2 float32.
    quantised = "@" in server.precision
    drafted = bool(server.drafts.num_drafts)
    return (
        *(() if quantised else (Setting("option", "--quantize", "int8"),)),
        *(() if drafted else (Setting("option", "--speculative", "ngram"),)),
    )


def drafts_cost_time(seen: Evidence) -> Advice | None:
    """Steps with drafts take longer than plain ones would for the same tokens."""
    drafts = seen.server.drafts
    if not drafts.num_drafts:
        return None
    if drafts.num_drafts < ENOUGH_DRAFTS or not drafts.seconds:
        raise NotMeasured(f"{ENOUGH_DRAFTS} drafts or more; there were {drafts.num_drafts:.0f}")
    gain = drafts.plain_seconds / drafts.seconds
    if gain > EVEN:
        return None
    return Advice(
        technique="decode without drafts",
        evidence=(
            f"steps with drafts took {drafts.seconds:.2f} s; plain ones would have taken "
            f"{drafts.plain_seconds:.2f} s for the same tokens: {gain:.2f} times the speed",
            f"{drafts.num_accepted / drafts.num_tokens:.0%} of {drafts.num_tokens:.0f} drafted tokens were "
            "accepted",
        ),
        trade_off="texts that repeat themselves (code, summaries, quotes) would lose what drafts bring them",
        settings=(Setting("option", "--speculative"),),
        watch=("jaxserve:spec_decode_seconds_total", "jaxserve:spec_decode_plain_seconds_total"),
    )


def prompts_stall_answers(seen: Evidence) -> Advice | None:
    """Tokens take far longer than steps that only decode: prompts are in their way."""
    server = seen.server
    mean, alone = server.tpot.mean, server.mean_decode_seconds
    if mean < STALLED * alone:
        return None
    name = server.main_class
    return Advice(
        technique="smaller prompt chunks, by a target for the time between tokens",
        evidence=(
            f"a token took {_ms(mean)} in the mean, a step that only decodes {_ms(alone)}: "
            f"{mean / alone:.2f} times as long",
            f"prompts have {server.prompt_lens.mean:.0f} tokens, answers {server.answer_lens.mean:.0f}",
        ),
        trade_off="first tokens come later, as prompts are read in smaller pieces",
        settings=(Setting("policy", f"classes.{name}.tpot_target", STALLED * alone),),
        watch=("vllm:inter_token_latency_seconds", "vllm:time_to_first_token_seconds"),
    )


def prompts_stall_despite_a_target(seen: Evidence) -> Advice | None:
    """Prompts are cut for a target that steps which only decode would keep, and it is missed all the same."""
    server = seen.server
    target = server.tpot_target
    if target is None:
        return None
    mean, alone = server.tpot.mean, server.mean_decode_seconds
    if mean <= target or alone > target:
        return None
    return Advice(
        technique="prompts computed on other devices than answers",
        evidence=(
            f"a token took {_ms(mean)} in the mean, a step that only decodes {_ms(alone)}; the target, for "
            f"which prompts are cut, is {_ms(target)}",
            f"prompts have {server.prompt_lens.mean:.0f} tokens, answers {server.answer_lens.mean:.0f}",
        ),
        trade_off="other devices, with all weights, that do nothing while there are no prompts: in all fewer "
        "tokens a second than with as many more along data or tensor",
        settings=(Setting("option", "--prefill-mesh", "tensor=1"),),
        watch=("vllm:inter_token_latency_seconds", "jaxserve:prefill_local_prompts_total"),
    )


def gaps_are_long(seen: Evidence) -> Advice | None:
    """The same, in a benchmark: now and then an answer stands still."""
    late = [run for run in seen.runs if run.itl_p50 and run.itl_p99 >= LONG_GAPS * run.itl_p50]
    if not late:
        return None
    worst = max(late, key=lambda run: run.itl_p99 / run.itl_p50)
    return Advice(
        technique="smaller prompt chunks, by a target for the time between tokens",
        evidence=(
            f"with {worst.label} gaps between pieces are {_ms(worst.itl_p50)} in the median and "
            f"{_ms(worst.itl_p99)} at the 99th percentile",
        ),
        trade_off="first tokens come later, as prompts are read in smaller pieces",
        settings=(Setting("policy", "classes.default.tpot_target", STALLED * worst.tpot_p50),),
        watch=("vllm:inter_token_latency_seconds", "vllm:time_to_first_token_seconds"),
    )


RULES = (
    Rule("batch-past-limit", Question.LATENCY, batch_past_the_limit),
    Rule("load-past-limit", Question.LATENCY, load_past_the_limit),
    Rule("one-answer-too-slow", Question.LATENCY, one_answer_is_too_slow),
    Rule("drafts-cost-time", Question.LATENCY, drafts_cost_time),
    Rule("prompts-stall-answers", Question.FIGHT, prompts_stall_answers),
    Rule("prompts-stall-despite-target", Question.FIGHT, prompts_stall_despite_a_target),
    Rule("long-gaps", Question.FIGHT, gaps_are_long),
)
