"""The drafters that a user may choose by name."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.speculation.drafter import EngineDrafter, Speculation
from jaxserve.speculation.ngram import NgramDrafter

SPECULATIVE_HELP = (
    "ngram: as their own text went on before; ngram:TOKENS: or as others of the same tenant or namespace "
    "did, of which the last TOKENS are kept; skip:N: by the model's first N layers; draft:MODEL: by a "
    "second model with the same vocabulary"
)
DEFAULT_MAX_DRAFTS = 7
"""A step of eight rows, which are a multiple of what machines like."""


@dataclass(frozen=True)
class Choice:
    """What drafts, as its name says."""

    name: str
    shared_tokens: int = 0
    """Of answers that have ended, kept to draft others from; 0 where none are."""
    num_layers: int = 0
    """Layers of the model that draft in the engine; 0 where something else drafts."""
    model: str = ""
    """The model that drafts in the engine, as any is named; "" where something else drafts."""

    @property
    def in_engine(self) -> bool:
        """Whether the engine drafts."""
        return bool(self.num_layers or self.model)

    @property
    def label(self) -> str:
        """The name for metrics and receipts: of a model in a folder, without the folder's place."""
        is_path = self.model.startswith((".", "~", "/")) or self.model.count("/") > 1
        return f"draft:{self.model.rstrip('/').rpartition('/')[2]}" if is_path else self.name


def read_speculative(name: str) -> Choice:
    """What a name stands for.

    Raises ValueError for one that is none of "ngram", "ngram:TOKENS" and "skip:N", with numbers from 1 up,
    and "draft:MODEL".
    """
    kind, _, rest = name.partition(":")
    if name == "ngram":
        return Choice(name)
    number = int(rest) if rest.isascii() and rest.isdecimal() else 0
    if kind == "ngram" and number:
        return Choice(name, shared_tokens=number)
    if kind == "skip" and number:
        return Choice(name, num_layers=number)
    if kind == "draft" and rest:
        return Choice(name, model=rest)
    known = "ngram, ngram:TOKENS, skip:N (N layers, from 1 up), draft:MODEL"
    raise ValueError(f"{name!r} is not one of {known}")


def named_speculation(name: str | None, max_drafts: int) -> Speculation | None:
    """What a name stands for: "ngram" looks answers up in their own text, "ngram:TOKENS" also in so many
    tokens of others of the same tenant or namespace; with "skip:N" the engine drafts by its first N layers,
    with "draft:MODEL" by a second model; None drafts nothing.

    Raises ValueError as `read_speculative` does.
    """
    if name is None:
        return None
    choice = read_speculative(name)
    drafter = EngineDrafter if choice.in_engine else NgramDrafter
    return Speculation(
        drafter=drafter, max_drafts=max_drafts, name=choice.label, shared_tokens=choice.shared_tokens
    )
