"""Guessing how texts go on, so that a step can verify several tokens at once. No jax, and no scheduler."""

from jaxserve.speculation.choices import (
    DEFAULT_MAX_DRAFTS,
    SPECULATIVE_HELP,
    Choice,
    named_speculation,
    read_speculative,
)
from jaxserve.speculation.drafter import Drafter, EngineDrafter, Speculation
from jaxserve.speculation.ngram import NgramDrafter
from jaxserve.speculation.shared_texts import SharedTexts

__all__ = [
    "DEFAULT_MAX_DRAFTS",
    "SPECULATIVE_HELP",
    "Choice",
    "Drafter",
    "EngineDrafter",
    "NgramDrafter",
    "SharedTexts",
    "Speculation",
    "named_speculation",
    "read_speculative",
]
