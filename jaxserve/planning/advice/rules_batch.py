"""Rules about how many answers go on side by side."""

from __future__ import annotations

from jaxserve.planning.advice.evidence import Evidence
from jaxserve.planning.advice.finding import Advice, Question, Rule, Setting
from jaxserve.planning.advice.rules_latency import limit_in_force
from jaxserve.planning.advice.server_window import ServerWindow
from jaxserve.planning.advice.thresholds import OFTEN, ROOM_LEFT

_QUEUE = ("jaxserve:kept_out_steps_total", "vllm:request_queue_time_seconds")


def _batch(server: ServerWindow) -> str:
    return (
        f"a step moved {server.batch:.1f} answers on in the mean; there are {server.num_slots} slots, and at "
        f"the end {server.num_running} ran and {server.num_waiting} waited"
    )


def slots_are_full(seen: Evidence) -> Advice | None:
    """Every slot is taken and requests wait, though there are pages and time for more."""
    server = seen.server
    share, usage = server.kept_out("slots"), server.kv_usage
    if share < OFTEN or usage > ROOM_LEFT:
        return None
    limit = limit_in_force(seen)
    if limit is not None and server.tpot.quantile(0.95) > limit:
        return None
    num_slots = int(server.num_slots / max(usage, 0.5))
    return Advice(
        technique="more slots",
        evidence=(
            f"{share:.0%} of steps left requests waiting with all {server.num_slots} slots taken",
            f"{usage:.0%} of the KV pool is held by those that run",
        ),
        trade_off="each answer's tokens come more slowly, as more share a step; steps are compiled anew",
        settings=(Setting("option", "--num-slots", str(num_slots)),),
        watch=(*_QUEUE, "vllm:request_time_per_output_token_seconds", "vllm:kv_cache_usage_perc"),
    )


def rows_hold_the_batch(seen: Evidence) -> Advice | None:
    """Slots are free and requests wait, because steps have no rows left for their prompts."""
    server = seen.server
    share = server.kept_out("rows")
    if share < OFTEN:
        return None
    lengths = server.prompt_lens
    rows = 1 << max(4, int(2 * lengths.mean).bit_length())
    return Advice(
        technique="larger prompt chunks",
        evidence=(
            f"{share:.0%} of steps left requests waiting for rows while slots were free",
            f"prompts have {lengths.mean:.0f} tokens in the mean, {lengths.quantile(0.95):.0f} at the 95th "
            "percentile",
            _batch(server),
        ),
        trade_off="a step with prompts takes longer, so tokens of running answers come less evenly",
        settings=(Setting("option", "--max-chunk", str(rows)),),
        watch=(*_QUEUE, "vllm:inter_token_latency_seconds"),
    )


def target_holds_the_batch(seen: Evidence) -> Advice | None:
    """Slots are free and requests wait, because more answers would miss a class's time between tokens."""
    server = seen.server
    share = server.kept_out("tpot_target")
    if share < OFTEN:
        return None
    target, name = server.tpot_target, server.main_class
    sizes = ", ".join(
        f"{rows} rows {1e3 * seconds:.1f} ms" for rows, seconds in server.decode_seconds.items()
    )
    promised = "of the tightest class" if target is None else f"of class {name}, {1e3 * target:.0f} ms"
    return Advice(
        technique="a longer time between tokens, or more replicas",
        evidence=(
            f"{share:.0%} of steps left requests waiting with slots free, to keep the target {promised}",
            f"steps that only decode take: {sizes}",
            _batch(server),
        ),
        trade_off="tokens come more slowly; with a replica each keeps its pace, at the price of a machine",
        settings=(Setting("policy", f"classes.{name}.tpot_target", 2 * (target or server.tpot.mean)),),
        watch=("jaxserve:kept_out_steps_total", "jaxserve:class_time_per_output_token_seconds"),
    )


RULES = (
    Rule("slots-full", Question.TOGETHER, slots_are_full),
    Rule("batch-held-by-rows", Question.TOGETHER, rows_hold_the_batch),
    Rule("batch-held-by-target", Question.TOGETHER, target_holds_the_batch),
)
