"""Writes down how an answer came about."""

from __future__ import annotations

from jaxserve.outputs import RequestOutput
from jaxserve.version import __version__
from server.core.identity import ModelIdentity
from server.core.requests import CachePath, Choice, GenerateRequest, Receipt


def make_receipt(
    identity: ModelIdentity, request: GenerateRequest, output: RequestOutput, choice: Choice, reuses: bool
) -> Receipt:
    """The receipt of an answered request, whose priority is the class that it was served in.

    `reuses`: whether the engine keeps a prefix cache at all.
    """
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
