"""What "auto" becomes, what is refused, and what loading costs in memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxserve.config import EngineConfig, LayerKind, ModelConfig
from jaxserve.engine.build import configure, resolve_config
from jaxserve.engine.ladder import decode_shapes
from jaxserve.engine.options import EngineOptions
from jaxserve.weights import open_checkpoint, pull
from pallas_kernels.page_layout import PageLayout
from tests.oracle.tiny_models import write_tiny_model


def model_config(**changes: Any) -> ModelConfig:
    fields: dict[str, Any] = {
        "family": "llama",
        "vocab_size": 1000,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_size": 64,
        "layers": (LayerKind(),) * 3,
        "max_position": 4096,
    }
    return ModelConfig(**(fields | changes))


def resolved(options: EngineOptions, platform: str = "cpu", **changes: Any) -> EngineConfig:
    return resolve_config(model_config(**changes), options, platform, "float32", 4096)


def test_a_cpu_engine_has_few_shapes() -> None:
    config = resolved(EngineOptions())
    assert config.decode_rows == (1, 4, 16)
    assert config.chunk_rows == (16, 64, 128, 256)
    assert config.num_slots == 16
    assert resolved(EngineOptions(num_slots=1)).chunk_rows == (64, 256)
    assert resolved(EngineOptions(num_slots=1, max_chunk=40)).chunk_rows == (64,)


def test_shape_invariant_numerics_have_no_single_row() -> None:
    for num_slots in (1, 16):
        config = resolved(EngineOptions(num_slots=num_slots, deterministic=True))
        assert config.chunk_rows == (4, 16, 64, 256)
        assert decode_shapes(config) == ()


def test_but_where_products_are_exact_a_step_may_be_of_one_row() -> None:
    config = resolved(EngineOptions(quantize="int8", deterministic=True))
    assert config.chunk_rows == (1, 4, 16, 64, 128, 256)
    assert resolved(EngineOptions(quantize="int8", deterministic=True, num_slots=1)).chunk_rows == (
        1,
        64,
        256,
    )
    drafting = resolved(EngineOptions(quantize="w8a8", deterministic=True, speculative="ngram"))
    assert drafting.chunk_rows == (1, 2, 4, 8, 16, 32, 64, 128, 256)
    plain = resolved(EngineOptions(speculative="ngram"))
    assert (plain.decode_rows, plain.chunk_rows) == ((1, 4, 16), (2, 4, 8, 16, 32, 64, 128, 256))
    assert resolved(EngineOptions(quantize="int4", deterministic=True)).chunk_rows[0] == 4
    experts: dict[str, Any] = {"num_experts": 4, "experts_per_token": 2, "expert_intermediate_size": 32}
    routed = resolved(
        EngineOptions(quantize="int8", deterministic=True), layers=(LayerKind(experts=True),) * 3, **experts
    )
    assert routed.chunk_rows[0] == 4


@pytest.mark.parametrize(
    ("options", "invariant"),
    [
        ({"quantize": "int8"}, True),
        ({"quantize": "int8", "kv_format": "int8"}, True),
        ({"quantize": "int8", "deterministic": False}, False),
        ({"quantize": "int8", "kv_format": "float8_e4m3fn"}, False),
        ({"quantize": "int8", "page_size": 8}, False),
        ({"quantize": "int8", "max_iterations": 4}, False),
        ({"quantize": "int8-weight-only"}, False),
        ({}, False),
        ({"deterministic": True}, True),
    ],
    ids=str,
)
def test_numerics_are_shape_invariant_where_that_costs_nothing(
    options: dict[str, Any], invariant: bool, tmp_path: Path, native_kernels: None
) -> None:
    checkpoint = open_checkpoint(write_tiny_model("llama_gqa_tied", tmp_path / "model"))
    assert configure(checkpoint, EngineOptions(max_model_len=64, **options)).deterministic is invariant


def test_all_slots_can_fill_up_where_memory_allows() -> None:
    config = resolved(EngineOptions(num_slots=2, kv_memory=2**40))
    assert config.cache.num_pages == (2 * 4096 // 16 + 2,)


@pytest.mark.parametrize("kv_format", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("head_size", [8, 64, 96, 256])
def test_the_pool_keeps_to_its_memory(kv_format: Any, head_size: int) -> None:
    budget = 5_000_000
    options = EngineOptions(kv_memory=budget, kv_format=kv_format)
    layers = (LayerKind(window=128), LayerKind(window=128), LayerKind())
    config = resolved(options, layers=layers, head_size=head_size)
    used = 0
    for num_pages, num_layers in zip(config.cache.num_pages, (2, 1), strict=True):
        layout = PageLayout(16, 2, head_size, num_pages, kv_format, kv_format)
        used += layout.num_bytes(num_layers)
    assert 0.9 * budget < used <= budget


def test_a_window_group_has_no_more_pages_than_its_window_needs() -> None:
    layers = (LayerKind(window=128), LayerKind())
    config = resolved(EngineOptions(num_slots=4, max_chunk=64, kv_memory=2**40), layers=layers)
    windowed, full = config.cache.num_pages
    assert windowed < full // 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_slots": 0}, "num_slots 0 is not a whole number from 1 up"),
        ({"page_size": -16}, "page_size -16 is not"),
        ({"kv_memory": 1.5}, r"kv_memory 1\.5 is not"),
        ({"kv_format": "fp8"}, "kv_format 'fp8' is not one of auto, float32, bfloat16, int8"),
        ({"dtype": "float16"}, "dtype 'float16' is not one of auto, float32, bfloat16"),
        ({"max_logprobs": 0}, "max_logprobs 0 is not"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineOptions(**options)


def test_sizes_that_do_not_go_are_named() -> None:
    with pytest.raises(ValueError, match="page_size 24 is not a power of two"):
        resolved(EngineOptions(page_size=24))
    with pytest.raises(ValueError, match="1000 bytes of KV memory"):
        resolved(EngineOptions(kv_memory=1000))
    with pytest.raises(ValueError, match="9 end-of-sequence ids; the limit is 8"):
        resolved(EngineOptions(), eos_token_ids=tuple(range(9)))


MEASURE_LOADING = """
import sys
import jax, numpy as np
from jaxserve.engine.parameters import place_parameters
from jaxserve.weights import open_checkpoint
from pathlib import Path

def resident(key):
    return int(open("/proc/self/status").read().split(key + ":")[1].split()[0]) * 1024

checkpoint = open_checkpoint(Path(sys.argv[1]))
place_parameters([("embed", np.zeros((2, 2), np.float32))], checkpoint.config, sys.argv[2])
before = resident("VmRSS")
params = jax.block_until_ready(place_parameters(checkpoint.read("float32"), checkpoint.config, sys.argv[2]))
arrays = jax.tree.leaves(params)
print(resident("VmHWM") - before, sum(a.nbytes for a in arrays), max(a.nbytes for a in arrays))
"""


@pytest.mark.real
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads peak memory from /proc")
@pytest.mark.parametrize("layer_loop", ["switched", "stacked"])
def test_loading_holds_one_copy_of_the_weights(layer_loop: str) -> None:
    path = pull("smollm2-135m", progress=False)
    command = [sys.executable, "-c", MEASURE_LOADING, str(path), layer_loop]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, check=True)
    peak, loaded, largest = map(int, done.stdout.split())
    assert peak < 1.3 * loaded + largest
