"""Token ids for a trace that has none: prompts that share exactly the prefixes their hashes say."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from jaxserve.planning.traces import BLOCK_TOKENS, TraceRequest

ANSWER_TOKEN = 0
"""Never in a prompt: what an engine without a model may answer with."""

_UNIT = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


class PromptMaker:
    """Makes the prompt of a trace's request: always the same for the same seed.

    A block of 512 tokens is a function of its hash alone. Its first few tokens spell the hash, so that two
    prompts part within them (8 tokens in a vocabulary of 257, fewer than any page): at the granularity of
    pages they share what their hashes share and nothing else.
    """

    def __init__(self, vocab_size: int, *, seed: int = 0) -> None:
        """Raises ValueError for a vocabulary below 3: one id is the answers', two can spell."""
        if vocab_size < 3:
            raise ValueError(f"vocab_size {vocab_size} is below 3")
        self._base = np.uint64(vocab_size - 1)
        self._num_digits = math.ceil(64 / math.log2(vocab_size - 1))
        self._seed = np.uint64(seed)

    def prompt(self, request: TraceRequest, number: int) -> npt.NDArray[np.int32]:
        """Token ids [prompt_tokens], in [1, vocab_size).

        `number`, the request's place in its trace, makes the prompt its own where it has no hashes.
        """
        keys_B = self._keys(request, number)
        positions_t = np.arange(BLOCK_TOKENS, dtype=np.uint64) + np.uint64(1)
        tokens_Bt = _mix(keys_B[:, None] + positions_t * _UNIT) % self._base
        for digit in range(min(self._num_digits, BLOCK_TOKENS)):
            tokens_Bt[:, digit] = keys_B % self._base
            keys_B = keys_B // self._base
        return tokens_Bt.reshape(-1)[: request.prompt_tokens].astype(np.int32) + np.int32(1)

    def _keys(self, request: TraceRequest, number: int) -> npt.NDArray[np.uint64]:
        """A key for each block: even ones from hashes, odd ones from request numbers, so that none meet."""
        if request.prefix_hashes:
            plain = np.array(
                [known & (2**63 - 1) for known in request.prefix_hashes], np.uint64
            ) << np.uint64(1)
        else:
            num_blocks = -(-request.prompt_tokens // BLOCK_TOKENS)
            plain = (np.arange(num_blocks, dtype=np.uint64) + np.uint64(number << 24)) << np.uint64(1)
            plain |= np.uint64(1)
        return _mix((plain ^ self._seed) + _UNIT)


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """A bijection of 64-bit words that leaves no pattern (Steele, Lea, Flood 2014: SplitMix64)."""
    values = (values ^ (values >> np.uint64(30))) * _MIX[0]
    values = (values ^ (values >> np.uint64(27))) * _MIX[1]
    return values ^ (values >> np.uint64(31))
