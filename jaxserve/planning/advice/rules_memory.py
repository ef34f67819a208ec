"""Rules about the KV pool: whether sequences fit, and whether they have to give way to one another."""

from __future__ import annotations

from jaxserve.planning.advice.evidence import Evidence
from jaxserve.planning.advice.finding import A_SIZE, Advice, Question, Rule, Setting
from jaxserve.planning.advice.missing import NotMeasured
from jaxserve.planning.advice.server_window import ServerWindow
from jaxserve.planning.advice.thresholds import OFTEN, PREEMPTED, RECOMPUTED

NARROW_KV_FORMATS = ("int8", "float8_e4m3fn")
_LARGER_POOL = Setting("option", "--kv-memory", A_SIZE)
_PRESSURE = ("vllm:kv_cache_usage_perc", "vllm:num_preemptions_total")


def num_that_fit(server: ServerWindow) -> float:
    """Sequences of the usual length that the pool holds at once, shared prefixes counted once."""
    return server.pool_tokens / max(server.own_tokens, 1.0)


def _more_room(server: ServerWindow) -> tuple[Setting, str]:
    """How the pool holds more tokens, and what that costs."""
    if server.kv_format in NARROW_KV_FORMATS:
        return _LARGER_POOL, "memory that is then nobody else's"
    return (
        Setting("option", "--kv-format", "int8"),
        f"keys and values in 8 bits instead of {server.kv_format}: measure it by `jaxserve evaluate`",
    )


def longest_does_not_fit(seen: Evidence) -> Advice | None:
    """A sequence of the traffic is longer than the whole pool, and would be refused."""
    longest, server = seen.traffic.longest, seen.server
    if longest is None:
        raise NotMeasured("a trace, which has the lengths of prompts and answers")
    if longest <= server.pool_tokens:
        return None
    setting, cost = _more_room(server)
    return Advice(
        technique="a pool that holds the longest sequence",
        evidence=(
            f"the longest request of {seen.traffic.name} has {longest} tokens with its answer; the whole "
            f"pool holds {server.pool_tokens}",
        ),
        trade_off=cost,
        settings=(setting,),
        watch=("jaxserve:request_refused_total", "vllm:kv_cache_usage_perc"),
    )


def pages_hold_the_batch(seen: Evidence) -> Advice | None:
    """Slots are free and requests wait, because the pool has no room for them."""
    server = seen.server
    share = server.kept_out("pages")
    if share < OFTEN:
        return None
    setting, cost = _more_room(server)
    return Advice(
        technique="more tokens in the KV pool",
        evidence=(
            f"{share:.0%} of steps left requests waiting for pages while slots were free",
            f"a step moved {server.batch:.1f} answers on in the mean; there are {server.num_slots} slots",
        ),
        trade_off=cost,
        settings=(setting,),
        watch=("jaxserve:kept_out_steps_total", *_PRESSURE),
    )


def pool_is_oversubscribed(seen: Evidence) -> Advice | None:
    """Running answers lose their pages to others, and compute again what they had."""
    server = seen.server
    rate = server.num_preemptions / server.num_answers
    if rate < PREEMPTED and server.recomputed_share < RECOMPUTED:
        return None
    fitting = max(1, min(server.num_slots, int(num_that_fit(server))))
    return Advice(
        technique="start no more than can end",
        evidence=(
            f"{server.num_preemptions:.0f} preemptions, {rate:.2f} for each answer",
            f"{server.num_recomputed:.0f} tokens were computed again, {server.recomputed_share:.1%} of all",
            f"the pool holds {num_that_fit(server):.1f} sequences of the usual {server.own_tokens:.0f} "
            f"tokens; there are {server.num_slots} slots",
        ),
        trade_off="fewer run at once and more wait; what runs is not interrupted",
        settings=(
            Setting("policy", "pages_ahead", 1.0),
            *((Setting("option", "--num-slots", str(fitting)),) if fitting < server.num_slots else ()),
        ),
        watch=(
            "vllm:num_preemptions_total",
            "jaxserve:recomputed_tokens_total",
            "vllm:request_queue_time_seconds",
        ),
    )


RULES = (
    Rule("longest-does-not-fit", Question.FITS, longest_does_not_fit),
    Rule("batch-held-by-pages", Question.MEMORY, pages_hold_the_batch),
    Rule("kv-oversubscribed", Question.MEMORY, pool_is_oversubscribed),
)
