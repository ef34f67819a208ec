"""Guessing how texts go on, so that a step can verify several tokens at once. No jax, and no scheduler."""

from jaxserve.speculation.drafter import Drafter, Speculation
from jaxserve.speculation.ngram import NgramDrafter

__all__ = ["Drafter", "NgramDrafter", "Speculation"]
