"""The drafters that a user may choose by name."""

from __future__ import annotations

from jaxserve.speculation.drafter import EngineDrafter, Speculation
from jaxserve.speculation.ngram import NgramDrafter

SPECULATIVE_HELP = "ngram: as their own text went on before; skip:N: by the model's first N layers"
DEFAULT_MAX_DRAFTS = 7
"""A step of eight rows, which are a multiple of what machines like."""


def read_speculative(name: str) -> int:
    """Layers of the model that are to draft in the engine; 0 where drafts come from the host.

    Raises ValueError for a name that is none of "ngram" and "skip:N", with N from 1 up.
    """
    kind, _, number = name.partition(":")
    if name == "ngram":
        return 0
    if kind == "skip" and number.isdecimal() and int(number):
        return int(number)
    raise ValueError(f"{name!r} is not one of ngram, skip:N (N layers, from 1 up)")


def named_speculation(name: str | None, max_drafts: int) -> Speculation | None:
    """What a name stands for: "ngram" looks answers up in their own text, with "skip:N" the engine drafts by
    its first N layers; None drafts nothing. Raises ValueError as `read_speculative` does."""
    if name is None:
        return None
    drafter = EngineDrafter if read_speculative(name) else NgramDrafter
    return Speculation(drafter=drafter, max_drafts=max_drafts, name=name)
