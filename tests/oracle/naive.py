"""The sampler's transform of one row, written as plainly as its definition: slow, float64, numpy.

The order is: bias, penalties, forbidden tokens, temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from jaxserve.plan import SamplingParams

Row = npt.NDArray[np.float64]


def transform_logits(
    logits: npt.ArrayLike,
    params: SamplingParams,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    eos_ids: Sequence[int] = (),
) -> Row:
    """The logits from which the next token is drawn.

    `logits` is [V], the model's; `prompt_ids` and `output_ids` are the request's tokens so far; `eos_ids`
    are what `min_tokens` forbids beside the request's own stop ids. Returns [V], with -inf for a token
    that can't be drawn. A greedy request ends with the forbidden tokens: its choice is the largest, and
    the lowest id among equals.

    Raises ValueError if every token is forbidden.
    """
    row = np.array(logits, dtype=np.float64)
    for token_id, bias in (params.logit_bias or {}).items():
        row[token_id] += bias
    row = _penalise(row, params, prompt_ids, output_ids)
    row[_forbidden(len(row), params, len(output_ids), eos_ids)] = -np.inf
    if not np.isfinite(row).any():
        raise ValueError("no token is left to draw")
    if params.greedy:
        return row
    row = row / params.temperature
    row = _keep_top_k(row, params.top_k)
    row = _keep_top_p(row, params.top_p)
    return _keep_min_p(row, params.min_p)


def probabilities(row: Row) -> Row:
    """The softmax of [V] logits, of which some may be -inf."""
    weights = np.exp(row - row.max())
    return weights / weights.sum()


def _penalise(row: Row, params: SamplingParams, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> Row:
    """Repetition counts the prompt, presence and frequency only what was answered."""
    row = row.copy()
    for token_id in {*prompt_ids, *output_ids}:
        if row[token_id] > 0:
            row[token_id] /= params.repetition_penalty
        else:
            row[token_id] *= params.repetition_penalty
    for token_id, count in Counter(output_ids).items():
        row[token_id] -= params.frequency_penalty * count + params.presence_penalty
    return row


def _forbidden(
    vocab_size: int, params: SamplingParams, num_output: int, eos_ids: Sequence[int]
) -> npt.NDArray[np.bool_]:
    forbidden = np.zeros(vocab_size, dtype=bool)
    if params.allowed_token_ids is not None:
        forbidden[:] = True
        forbidden[list(params.allowed_token_ids)] = False
    forbidden[list(params.bad_token_ids or ())] = True
    if num_output < params.min_tokens:
        forbidden[[*eos_ids, *params.stop_token_ids]] = True
    return forbidden


def _keep_top_k(row: Row, top_k: int) -> Row:
    if top_k in (0, -1):
        return row
    return _keep(row, _most_likely_first(row)[:top_k])


def _keep_top_p(row: Row, top_p: float) -> Row:
    """Keep the most likely tokens until their probability, of all that are left, reaches `top_p`."""
    if top_p == 1.0:
        return row
    order = _most_likely_first(row)
    ordered = probabilities(row)[order]
    likelier = np.cumsum(ordered) - ordered
    return _keep(row, order[likelier < top_p])


def _keep_min_p(row: Row, min_p: float) -> Row:
    likelihood = probabilities(row)
    return _keep(row, np.flatnonzero(likelihood >= min_p * likelihood.max()))


def _most_likely_first(row: Row) -> npt.NDArray[np.intp]:
    """Token ids by falling logit, equals by rising id."""
    return np.argsort(-row, kind="stable")


def _keep(row: Row, token_ids: npt.NDArray[np.intp]) -> Row:
    kept = np.full_like(row, -np.inf)
    kept[token_ids] = row[token_ids]
    return kept
