"""Engines by the kernels for this CPU answer as those by XLA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.loop import HostLoop
from jaxserve.outputs import RequestOutput
from jaxserve.plan import SamplingParams
from tests.engine.models import serve, small_engine
from tests.oracle.tiny_models import write_tiny_model

SCORED = SamplingParams(temperature=0, max_tokens=12, logprobs=0, prompt_logprobs=0, ignore_eos=True)
OTHER_KERNELS = ("ragged_paged_attention", "rms_norm", "gated_activation")
PROMPTS = [list(range(3, 3 + length)) for length in (1, 5, 17, 40, 70)]


def answers(folder: Path, **settings: Any) -> list[RequestOutput]:
    loop = HostLoop(small_engine(folder, **settings))
    return serve(loop, [(prompt, SCORED) for prompt in PROMPTS])


def numbers(outputs: list[RequestOutput]) -> np.ndarray:
    """The log-probabilities of all prompts and answers."""
    found: list[float] = []
    for output in outputs:
        completion = output.outputs[0]
        assert output.prompt_logprobs is not None
        assert completion.logprobs is not None
        for row, token in zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True):
            assert row is not None
            found.append(row[token].logprob)
        for row, token in zip(completion.logprobs, completion.token_ids, strict=True):
            found.append(row[token].logprob)
    return np.array(found)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize(
    ("model", "kv_format", "bound"),
    [
        ("llama_gqa_tied", "float32", 1e-4),
        ("gemma3", "float32", 1e-4),
        # Where a key has fewer bits, a rounding error before it decides now and then which number is stored.
        ("qwen3_moe", "bfloat16", 1e-3),
        ("qwen2", "int8", 1e-2),
    ],
)
def test_attention_straight_from_the_pages_changes_no_answer(
    model: str, kv_format: str, bound: float, tmp_path: Path, native_kernels: None
) -> None:
    folder = write_tiny_model(model, tmp_path / model)
    ours = answers(folder, native=True, kv_format=kv_format)
    theirs = answers(folder, kv_format=kv_format)
    assert tokens(ours) == tokens(theirs)
    np.testing.assert_allclose(numbers(ours), numbers(theirs), atol=bound, rtol=0)


def test_int8_products_are_the_same_to_the_bit(tmp_path: Path, native_kernels: None) -> None:
    folder = write_tiny_model("llama_gqa_tied", tmp_path / "model")
    settings: dict[str, Any] = {
        "recipe": "int8",
        "deterministic": True,
        "chunk_rows": (4, 64),
        "overrides": tuple((name, "reference") for name in OTHER_KERNELS),
    }
    ours, theirs = answers(folder, native=True, **settings), answers(folder, **settings)
    assert tokens(ours) == tokens(theirs)
    np.testing.assert_array_equal(numbers(ours), numbers(theirs))
