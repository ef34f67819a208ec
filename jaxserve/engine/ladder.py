"""The ladder: the few shapes of step that are compiled."""

from __future__ import annotations

from jaxserve.config import EngineConfig
from jaxserve.plan import StepShape


def decode_shapes(config: EngineConfig) -> tuple[StepShape, ...]:
    """Steps with one row a sequence. None in the shape-invariant mode, which has chunk steps only, and
    where only prompts are computed."""
    if config.deterministic:
        return ()
    return tuple(StepShape(rows, rows, rows, decode=True) for rows in config.decode_rows)


def chunk_shapes(config: EngineConfig) -> tuple[StepShape, ...]:
    """Steps with any number of rows a sequence; in the smallest all rows have logits."""
    return tuple(
        StepShape(rows, min(rows, config.num_slots), min(rows, config.chunk_logit_rows))
        for rows in config.chunk_rows
    )


def read_widths(config: EngineConfig) -> tuple[int, ...]:
    """The numbers of tokens that a draft model reads at once: few, that a pause has left, or of prompts."""
    return tuple(sorted({min(16, config.chunk_rows[-1]), config.chunk_rows[-1]}) if config.draft else ())
