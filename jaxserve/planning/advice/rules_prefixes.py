"""Rules about what prompts have in common, and whether it is reused."""

from __future__ import annotations

from jaxserve.planning.advice.evidence import Evidence
from jaxserve.planning.advice.finding import A_SIZE, Advice, Question, Rule, Setting
from jaxserve.planning.advice.missing import NotMeasured
from jaxserve.planning.advice.repeats import Divergence, Repeats
from jaxserve.planning.advice.thresholds import FORGOTTEN, HALF_OF_WHAT_IS_POSSIBLE, REPEATED, WORTH_REUSING

_HITS = ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")
_EVICTIONS = ("jaxserve:prefix_cache_evicted_pages_total", "jaxserve:prefix_cache_stored_pages_total")


def _repeats(seen: Evidence) -> Repeats:
    repeats = seen.traffic.repeats
    if repeats is None:
        raise NotMeasured("a trace with prefix hashes, or JSON lines of prompts")
    return repeats


def prompts_diverge(seen: Evidence) -> Advice | None:
    """Prompts say the same again and again, but not from the beginning on, where alone it can be reused."""
    repeats = _repeats(seen)
    parting = repeats.divergence
    if parting is None or repeats.repeated_share - repeats.prefix_share < REPEATED:
        return None
    evidence = [
        f"{repeats.repeated_share:.0%} of what the {seen.traffic.num_requests} prompts of "
        f"{seen.traffic.name} say stood in earlier ones, but only {repeats.prefix_share:.0%} of it as a "
        "common beginning"
    ]
    if seen.known_server is not None and seen.known_server.looked_up_tokens:
        evidence.append(
            f"the server found {seen.known_server.hit_rate:.0%} of prompt tokens in its prefix cache"
        )
    return Advice(
        technique="move what differs behind what is common",
        evidence=(*evidence, _parting(parting)),
        trade_off="the model reads the part that changes later, which may change its answers",
        settings=(
            Setting(
                "request",
                "messages",
                f"begin with the common text; put {parting.kind or 'what differs'} behind it or leave it out",
            ),
        ),
        watch=_HITS,
    )


def _parting(parting: Divergence) -> str:
    kind = f", where {parting.kind} stands" if parting.kind else ""
    return (
        f"{parting.num_prompts} prompts part from others at {parting.unit} {parting.position}{kind}: after "
        f"{parting.before!r} come {parting.first!r} and {parting.second!r}"
    )


def cache_is_off(seen: Evidence) -> Advice | None:
    """Prompts begin alike, and the server computes each anew."""
    repeats, server = _repeats(seen), seen.server
    if server.looked_up_tokens or repeats.prefix_share < WORTH_REUSING:
        return None
    return Advice(
        technique="reuse prefixes",
        evidence=(
            f"{repeats.prefix_share:.0%} of the prompt tokens of {seen.traffic.name} are begun as before",
            f"the server looked none of the {server.prompt_lens.total:.0f} that it read up in a prefix cache",
        ),
        trade_off="pages that nobody uses stay in the pool until others need them; answers are the same",
        settings=(Setting("option", "--no-prefix-cache"),),
        watch=_HITS,
    )


def hits_below_what_is_there(seen: Evidence) -> Advice | None:
    """The cache finds far less than an unbounded one would: it forgets, or may not share."""
    repeats, server = _repeats(seen), seen.server
    possible = repeats.prefix_share
    if not server.looked_up_tokens or possible < WORTH_REUSING:
        return None
    if server.hit_rate > HALF_OF_WHAT_IS_POSSIBLE * possible:
        return None
    evidence = (
        f"{server.hit_rate:.0%} of prompt tokens were found in the prefix cache; without bounds it would "
        f"find {possible:.0%} of those of {seen.traffic.name}"
    )
    if server.forgotten_share < FORGOTTEN and server.num_tenants > 1:
        return Advice(
            technique="let tenants share what is no secret among them",
            evidence=(evidence, f"{server.num_tenants} tenants ask, and none may reuse what is another's"),
            trade_off="who shares a namespace can tell by the time to the first token what others have asked",
            settings=(Setting("request", "cache_salt", "the same cache_salt from all who may share"),),
            watch=_HITS,
        )
    return Advice(
        technique="keep prefixes in the host's memory",
        evidence=(
            evidence,
            f"{server.forgotten_share:.2f} pages were forgotten for each that was stored",
        ),
        trade_off="memory of the host, and a copy for each page that comes back",
        settings=(Setting("option", "--host-kv-memory", A_SIZE),),
        watch=(*_EVICTIONS, "jaxserve:swap_restored_pages_total"),
    )


def cache_forgets(seen: Evidence) -> Advice | None:
    """What is reused is also forgotten all the time."""
    server = seen.server
    if server.forgotten_share < FORGOTTEN or server.hit_rate < WORTH_REUSING:
        return None
    return Advice(
        technique="keep prefixes in the host's memory",
        evidence=(
            f"{server.forgotten_share:.2f} pages were forgotten for each that was stored",
            f"{server.hit_rate:.0%} of prompt tokens are found all the same, so there is something to keep",
        ),
        trade_off="memory of the host, and a copy for each page that comes back",
        settings=(Setting("option", "--host-kv-memory", A_SIZE),),
        watch=(*_EVICTIONS, "jaxserve:swap_restored_pages_total"),
    )


RULES = (
    Rule("prompts-diverge", Question.SHARED, prompts_diverge),
    Rule("prefix-cache-off", Question.SHARED, cache_is_off),
    Rule("hits-below-reuse", Question.SHARED, hits_below_what_is_there),
    Rule("cache-forgets", Question.SHARED, cache_forgets),
)
