"""The six questions, in the order in which they are asked, answered by what was measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from jaxserve.planning.advice.evidence import Evidence
from jaxserve.planning.advice.finding import Answer, Question
from jaxserve.planning.advice.missing import NotMeasured
from jaxserve.planning.advice.rules_latency import NO_LIMIT, limit_in_force
from jaxserve.planning.advice.rules_memory import num_that_fit
from jaxserve.planning.advice.thresholds import (
    LARGE_BATCH,
    OFTEN,
    PREEMPTED,
    STALLED,
    TOGETHER,
    UNEVEN,
    WORTH_REUSING,
)


def answer(question: Question, seen: Evidence) -> Answer:
    """Yes or no with the numbers, or what it takes to tell."""
    try:
        return _ANSWERS[question](seen)
    except NotMeasured as missing:
        return Answer(None, f"needs {missing}")


def _fits(seen: Evidence) -> Answer:
    server = seen.server
    fitting = num_that_fit(server)
    return Answer(
        fitting >= server.num_slots,
        f"the pool holds {server.pool_tokens} tokens, {fitting:.1f} sequences of the usual "
        f"{server.own_tokens:.0f} tokens of their own; there are {server.num_slots} slots",
    )


def _shared(seen: Evidence) -> Answer:
    traffic = seen.known_traffic
    if traffic is not None and traffic.repeats is not None:
        share = traffic.repeats.prefix_share
        return Answer(
            share >= WORTH_REUSING,
            f"{share:.0%} of the prompt tokens of {traffic.name} begin as earlier ones did",
        )
    if seen.known_server is None or not seen.known_server.looked_up_tokens:
        raise NotMeasured(
            "a trace with prefix hashes, prompts, or the metrics of a server with a prefix cache"
        )
    rate = seen.known_server.hit_rate
    return Answer(rate >= WORTH_REUSING, f"{rate:.0%} of prompt tokens were found in the prefix cache")


def _together(seen: Evidence) -> Answer:
    traffic = seen.known_traffic
    if traffic is not None and traffic.answers is not None and traffic.together_share is not None:
        uneven = traffic.answers.p95 / max(traffic.answers.p50, 1.0)
        return Answer(
            traffic.together_share >= TOGETHER and uneven >= UNEVEN,
            f"{traffic.together_share:.0%} of requests come within a second of the one before; the 95th "
            f"percentile of answer lengths is {uneven:.1f} times the median",
        )
    server = seen.server
    lengths = server.answer_lens
    uneven = lengths.quantile(0.95) / max(lengths.quantile(0.5), 1.0)
    return Answer(
        server.batch >= LARGE_BATCH and uneven >= UNEVEN,
        f"a step moves {server.batch:.1f} answers on in the mean; the 95th percentile of answer lengths is "
        f"{uneven:.1f} times the median",
    )


def _memory(seen: Evidence) -> Answer:
    server = seen.server
    waited, rate = server.kept_out("pages"), server.num_preemptions / server.num_answers
    return Answer(
        waited >= OFTEN or rate >= PREEMPTED,
        f"{waited:.0%} of steps left requests waiting for pages; {rate:.2f} preemptions for each answer",
    )


def _latency(seen: Evidence) -> Answer:
    limit = limit_in_force(seen)
    if limit is None:
        raise NotMeasured(NO_LIMIT)
    if seen.known_server is None:
        return Answer(True, f"the limit is {1e3 * limit:.1f} ms a token")
    tpot = seen.known_server.tpot.quantile(0.95)
    return Answer(
        True, f"the limit is {1e3 * limit:.1f} ms a token, and the 95th percentile {1e3 * tpot:.1f} ms"
    )


def _fight(seen: Evidence) -> Answer:
    server = seen.server
    ratio = server.tpot.mean / server.mean_decode_seconds
    return Answer(
        ratio >= STALLED,
        f"a token takes {ratio:.2f} times as long as a step that only decodes",
    )


_ANSWERS: Mapping[Question, Callable[[Evidence], Answer]] = {
    Question.FITS: _fits,
    Question.SHARED: _shared,
    Question.TOGETHER: _together,
    Question.MEMORY: _memory,
    Question.LATENCY: _latency,
    Question.FIGHT: _fight,
}
