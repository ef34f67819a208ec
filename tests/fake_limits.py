"""Limits of an engine that is not real."""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.plan import EngineLimits, StepShape


def make_limits(
    *,
    num_slots: int = 8,
    max_model_len: int = 128,
    page_size: int = 4,
    num_pages: Sequence[int] = (257,),
    windows: Sequence[int] = (0,),
    vocab_size: int = 97,
    chunk_rows: Sequence[int] = (16, 64, 256),
    max_logprobs: int = 5,
    eos_token_ids: Sequence[int] = (2,),
    copies_pages: bool = True,
    max_iterations: int = 1,
    max_drafts: int = 0,
    num_replicas: int = 1,
    decode_groups: int = 1,
) -> EngineLimits:
    """Limits as the real engine would state them for such a configuration."""
    own = num_slots // num_replicas
    logit_rows = max(own, min(16, chunk_rows[0]))
    most = -(-own // decode_groups)
    decode_rows = sorted({1 << exponent for exponent in range(20) if 1 << exponent < most} | {most})
    return EngineLimits(
        num_slots=num_slots,
        max_model_len=max_model_len,
        page_size=page_size,
        num_pages=tuple(num_pages),
        windows=tuple(windows),
        vocab_size=vocab_size,
        decode_shapes=tuple(StepShape(rows, rows, rows, decode=True) for rows in decode_rows),
        chunk_shapes=tuple(StepShape(rows, own, logit_rows) for rows in chunk_rows),
        max_logprobs=max_logprobs,
        eos_token_ids=tuple(eos_token_ids),
        copies_pages=copies_pages,
        max_iterations=max_iterations,
        max_drafts=max_drafts,
        num_replicas=num_replicas,
        decode_groups=decode_groups,
    )
