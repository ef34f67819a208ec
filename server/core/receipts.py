"""Writes down how an answer came about."""

from __future__ import annotations

from jaxserve.outputs import RequestOutput
from jaxserve.scheduling.draft_tally import SpeculationStatistics
from jaxserve.version import __version__
from server.core.identity import ModelIdentity
from server.core.requests import CachePath, Choice, GenerateRequest, Receipt


def make_receipt(
    identity: ModelIdentity,
    request: GenerateRequest,
    output: RequestOutput,
    choice: Choice,
    reuses: bool,
    speculation: SpeculationStatistics | None,
) -> Receipt:
    """The receipt of an answered request, whose priority is the class that it was served in.

    Args:
        identity: what answered.
        request: what was asked.
        output: what came of it.
        choice: why this route answered.
        reuses: whether the engine keeps a prefix cache at all.
        speculation: how the route's drafting stands; None where nothing drafts.
    """
    drafts = output.drafts
    return Receipt(
        route=choice.route,
        route_reason=choice.reason,
        model=identity.model,
        model_fingerprint=identity.fingerprint,
        tokenizer_fingerprint=identity.tokenizer_fingerprint,
        precision=identity.precision,
        kv_format=identity.kv_format,
        reused_tokens=output.num_cached_tokens,
        cache_path=_cache_path(request, output, reuses),
        cache_namespace=request.cache_namespace or "",
        tenant=request.tenant,
        priority_class=request.priority_class,
        decoding="greedy" if request.params.greedy else "sampled",
        drafter=speculation.drafter if speculation else "",
        drafting_state=speculation.state if speculation else "",
        drafted_tokens=drafts.num_drafted,
        accepted_tokens=drafts.num_accepted,
        accepted_length=round(drafts.accepted_length, 3),
        drafting_saved_seconds=round(drafts.seconds_saved, 6),
        seed=output.seed,
        engine_version=__version__,
        manifest=identity.manifest,
    )


def _cache_path(request: GenerateRequest, output: RequestOutput, reuses: bool) -> CachePath:
    if output.num_cached_tokens:
        return "warm"
    # The prompt's log-probabilities can only be had by computing all of it.
    reads = request.cache_read and request.params.prompt_logprobs is None
    return "cold" if reuses and reads else "off"
