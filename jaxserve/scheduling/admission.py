"""What is refused at the door: requests that no schedule could ever serve."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxserve.plan import MAX_STOP_IDS, EngineLimits, SamplingParams
from jaxserve.scheduling.pages import max_pages_spanned


def check_prompt(prompt_token_ids: Sequence[int], limits: EngineLimits) -> list[int]:
    """The prompt as a fresh list of plain integers.

    Raises ValueError if it is empty, holds anything but ids of the vocabulary, or leaves no room for a
    single sampled token.
    """
    ids = np.asarray(prompt_token_ids)
    if ids.size == 0:
        raise ValueError("the prompt is empty: at least one token id is needed")
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"a prompt is a flat sequence of token ids, got shape {ids.shape} of {ids.dtype}")
    if len(ids) > limits.max_model_len - 1:
        raise ValueError(
            f"the prompt has {len(ids)} tokens; the limit is {limits.max_model_len - 1}, "
            f"one below max_model_len {limits.max_model_len}"
        )
    unknown = ids[(ids < 0) | (ids >= limits.vocab_size)]
    if unknown.size:
        raise ValueError(f"unknown token id {unknown[0]}; the vocabulary has {limits.vocab_size} ids")
    return ids.tolist()


def check_params(params: SamplingParams, limits: EngineLimits) -> None:
    """Raise ValueError if the parameters ask for more than the engine can give."""
    params.check_vocabulary(limits.vocab_size)
    for name in ("logprobs", "prompt_logprobs"):
        asked = getattr(params, name)
        if asked is not None and asked > limits.max_logprobs:
            raise ValueError(f"{name} {asked} is above the limit, {limits.max_logprobs}")
    num_stop_ids = len(set(params.stop_token_ids))
    if params.min_tokens and num_stop_ids > MAX_STOP_IDS:
        raise ValueError(
            f"{num_stop_ids} stop_token_ids are above the limit, {MAX_STOP_IDS}, that holds with min_tokens"
        )
    _check_choice(params, limits)


def _check_choice(params: SamplingParams, limits: EngineLimits) -> None:
    """Raise ValueError if the ids that are withheld leave no token to sample."""
    withheld = set(params.bad_token_ids or ())
    if params.min_tokens:
        withheld.update(limits.eos_token_ids, params.stop_token_ids)
    allowed = params.allowed_token_ids
    if allowed is None and len(withheld) < limits.vocab_size:
        return
    if withheld.issuperset(range(limits.vocab_size) if allowed is None else allowed):
        raise ValueError(
            "no token could be sampled: bad_token_ids, and up to min_tokens the ids that end an answer, "
            f"withhold all of the {limits.vocab_size if allowed is None else len(allowed)} allowed ones"
        )


def check_pool(prompt_len: int, max_tokens: int, limits: EngineLimits) -> None:
    """Raise ValueError if the request would not fit the whole pool by itself."""
    reason = pool_obstacle(prompt_len, max_tokens, limits)
    if reason is not None:
        raise ValueError(reason)


def pool_obstacle(prompt_len: int, max_tokens: int, limits: EngineLimits) -> str | None:
    """Why a request would not fit the whole pool by itself, or None.

    The last sampled token is never computed, so it needs no room.
    """
    num_positions = prompt_len + max_tokens - 1
    pages_in_full = -(-num_positions // limits.page_size)
    for window, num_pages in zip(limits.windows, limits.num_pages, strict=True):
        needed = pages_in_full
        if window:
            needed = min(needed, max_pages_spanned(window + limits.longest_lag, limits.page_size))
        if needed > num_pages - 1:
            kind = f"window {window}" if window else "full attention"
            return (
                f"{prompt_len} prompt tokens and max_tokens {max_tokens} need {needed} pages of "
                f"{limits.page_size} tokens in the cache group with {kind}; the limit is its whole pool "
                f"of {num_pages - 1} pages"
            )
    return None
