"""What pages are cached under, and that answers do not tell whether they were."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jaxserve import LLM
from jaxserve.cache_identity import attention_share, cache_identity
from jaxserve.config import CacheConfig, EngineConfig, LayerKind, ModelConfig
from jaxserve.plan import SamplingParams
from tests.fake_model import FakeModel

MODEL = ModelConfig(
    family="llama",
    vocab_size=100,
    hidden_size=8,
    intermediate_size=16,
    num_heads=4,
    num_kv_heads=2,
    head_size=2,
    layers=(LayerKind(), LayerKind(window=4)),
    max_position=64,
)
CONFIG = EngineConfig(
    model=MODEL,
    cache=CacheConfig(page_size=4, num_pages=(8, 8)),
    max_model_len=64,
    num_slots=2,
    decode_rows=(2,),
    chunk_rows=(16,),
)


def test_the_identity_has_all_that_keys_and_values_depend_on() -> None:
    plain = cache_identity("f" * 32, CONFIG)
    assert plain == cache_identity("f" * 32, replace(CONFIG, num_slots=1))
    others = [
        cache_identity("e" * 32, CONFIG),
        cache_identity("f" * 32, replace(CONFIG, compute_format="bfloat16")),
        cache_identity("f" * 32, replace(CONFIG, recipe="int8")),
        cache_identity("f" * 32, replace(CONFIG, deterministic=True)),
        cache_identity("f" * 32, replace(CONFIG, cache=replace(CONFIG.cache, kv_format="int8"))),
    ]
    keys = {(one.model, one.kv_format) for one in (plain, *others)}
    assert len(keys) == 6


def test_attention_is_weighed_against_the_matrices() -> None:
    # Of 8: 4 + 4 query and output heads, 2 + 2 key and value heads of 2, and three matrices of 16.
    matrices = 8 * (12 * 2 + 3 * 16)
    scores_and_values = 2 * 4 * 2
    assert attention_share(MODEL) == scores_and_values / (2 * matrices)
    assert attention_share(replace(MODEL, layers=(LayerKind(window=4),))) == 0.0
    sparse = replace(
        MODEL,
        layers=(LayerKind(experts=True),),
        num_experts=4,
        experts_per_token=2,
        expert_intermediate_size=6,
    )
    assert attention_share(sparse) == scores_and_values / (8 * (12 * 2 + 3 * 12 + 4))


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_library_call_answers_the_same_warm_and_says_what_it_reused(prefix_caching: bool) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=2)
    asked: dict[str, Any] = {"sampling_params": params, "use_tqdm": False}
    with LLM(FakeModel().opened(), progress=False, prefix_caching=prefix_caching) as llm:
        (cold,), (warm,) = (llm.generate("the same beginning", **asked) for _ in range(2))
    assert warm.outputs == cold.outputs
    assert cold.num_cached_tokens == 0
    assert (warm.num_cached_tokens > 0) == prefix_caching
