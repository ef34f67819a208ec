"""What the fake engine knows of a sequence, and which tokens it computes: a digest of the last known ones."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from jaxserve.plan import EngineLimits, SamplingParams

CONTEXT = 3
"""Known tokens that a sampled token depends on."""
_MASK = (1 << 64) - 1


def digest(*values: int) -> int:
    """A 64-bit mix of integers (FNV-1a over words, then a finaliser)."""
    state = 0xCBF29CE484222325
    for value in values:
        state = ((state ^ (value & _MASK)) * 0x100000001B3) & _MASK
        state ^= state >> 29
    return state


@dataclass
class FakeSequence:
    """What the device knows of a slot."""

    tokens: list[int]
    num_prompt: int
    num_computed: int
    tables: list[dict[int, int]]
    params: SamplingParams
    seed: int
    sample_index: int
    eos_token_ids: tuple[int, ...]
    domain: Hashable = None
    max_known: int = 1 << 30
    masks: dict[int, list[int]] = field(default_factory=dict)
    """Token ids that may be sampled after so many drafts, of a gated sequence: good for one step."""
    histories: list[int] = field(default_factory=list)
    """For each known token a digest of all tokens up to it."""

    def __post_init__(self) -> None:
        tokens, self.tokens = self.tokens, []
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        self.histories.append(digest(self.histories[-1] if self.histories else 0, token))
        self.tokens.append(token)

    def cut(self, num_tokens: int) -> None:
        """Forget all tokens but so many."""
        del self.tokens[num_tokens:], self.histories[num_tokens:]


def sample(sequence: FakeSequence, position: int, vocab_size: int, mask: Sequence[int] | None = None) -> int:
    """The token after the row at `position`; `mask` has the only ones that it may be."""
    params = sequence.params
    noise = () if params.greedy else (sequence.seed, sequence.sample_index)
    context = sequence.tokens[max(0, position - CONTEXT + 1) : position + 1]
    allowed = list(mask) if mask is not None else sorted(params.allowed_token_ids or range(vocab_size))
    if position + 1 - sequence.num_prompt < params.min_tokens:
        stops = {*sequence.eos_token_ids, *params.stop_token_ids}
        allowed = [token for token in allowed if token not in stops]
    return allowed[digest(position, *context, *noise) % len(allowed)]


def unpack_mask(mask: npt.NDArray[np.uint32]) -> list[int]:
    """The token ids of a mask."""
    return np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0].tolist()


def logprob(token: int, position: int, history: int) -> float:
    return -(digest(token, position, history) % 4096) / 256.0


def rank(token: int, position: int, history: int, vocab_size: int) -> int:
    return 1 + digest(token, position, history, 1) % vocab_size


def expected_answer(
    limits: EngineLimits, prompt: Sequence[int], params: SamplingParams, seed: int, sample_index: int = 0
) -> tuple[list[int], str, int | None]:
    """Token ids, finish reason and stop reason of a sample, computed without any schedule."""
    eos_token_ids = limits.eos_token_ids
    sequence = FakeSequence(list(prompt), len(prompt), 0, [], params, seed, sample_index, eos_token_ids)
    max_tokens = limits.longest_answer(len(prompt), params.max_tokens)
    for num_output in range(1, max_tokens + 1):
        token = sample(sequence, len(sequence.tokens) - 1, limits.vocab_size)
        sequence.append(token)
        if num_output >= params.min_tokens:
            if token in eos_token_ids and not params.ignore_eos:
                return sequence.tokens[len(prompt) :], "stop", None
            if token in params.stop_token_ids:
                return sequence.tokens[len(prompt) :], "stop", token
    return sequence.tokens[len(prompt) :], "length", None
