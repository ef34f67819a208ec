"""Guessing how texts go on, so that a step can verify several tokens at once. No jax, and no scheduler."""

from jaxserve.speculation.choices import DEFAULT_MAX_DRAFTS, SPECULATIVE, Speculative, named_speculation
from jaxserve.speculation.drafter import Drafter, Speculation
from jaxserve.speculation.ngram import NgramDrafter

__all__ = [
    "DEFAULT_MAX_DRAFTS",
    "SPECULATIVE",
    "Drafter",
    "NgramDrafter",
    "Speculation",
    "Speculative",
    "named_speculation",
]
