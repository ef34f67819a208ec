"""Two small vocabularies that have everything: every byte, split emoji, special and user-defined tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import pre_tokenizers

from jaxserve.text import Tokenizer
from jaxserve.weights import pull

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


@pytest.fixture(scope="session")
def byte_level_metadata() -> dict[str, Any]:
    merges = ["h e", "l l", "he ll", "Ġ w", "ð Ł", "ðŁ ĺ", "Ã ©", "1 2"]
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(rule.replace(" ", "") for rule in merges)]
    special = ["<|start|>", "<|im_end|>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*words, *special, "[NAME é]"],
        "tokenizer.ggml.token_type": [*[NORMAL] * len(words), CONTROL, CONTROL, USER_DEFINED],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": len(words),
    }


@pytest.fixture(scope="session")
def sentencepiece_metadata() -> dict[str, Any]:
    pieces = ["th", "the", "▁the", "▁t", "▁", "t", "h", "e", "é", "▁▁", ",", "<"]
    added = ["\n\n", "[NAME]"]
    num_special = 3
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [
            *["<unk>", "<s>", "</s>"],
            *[f"<0x{byte:02X}>" for byte in range(256)],
            *pieces,
            *added,
        ],
        "tokenizer.ggml.token_type": [
            *[UNKNOWN, CONTROL, CONTROL],
            *[BYTE] * 256,
            *[NORMAL] * len(pieces),
            *[USER_DEFINED] * len(added),
        ],
        "tokenizer.ggml.scores": [
            *[0.0] * (num_special + 256),
            *[-float(rank) for rank in range(len(pieces))],
            *[0.0] * len(added),
        ],
    }


@pytest.fixture(scope="session")
def byte_level(byte_level_metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_gguf(byte_level_metadata)


@pytest.fixture(scope="session")
def sentencepiece(sentencepiece_metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_gguf(sentencepiece_metadata)


@pytest.fixture(scope="session", params=["byte_level", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """Each of the two in turn."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct, pulled when it is not in the cache."""
    return pull("smollm2-135m", progress=False)
