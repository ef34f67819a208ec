"""Footprints and step times against numbers worked out by hand, on a chip with round figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.config import LayerKind, ModelConfig
from jaxserve.plan import StepShape
from jaxserve.planning import CHIPS, MODELS, Chip, CostModel, Efficiency, Footprint, find_chip, find_model
from jaxserve.planning.cost_model import ALL_REDUCE_LATENCY
from jaxserve.planning.meshes import ChipMesh
from pallas_kernels.page_layout import PageLayout

CHIP = Chip(
    name="round",
    flops={"bfloat16": 1e12, "int8": 2e12},
    memory_bytes=1e9,
    memory_bandwidth=1e9,
    link_bandwidth=1e8,
    step_overhead=1e-3,
    source="made up",
)
IDEAL = Efficiency(compute=1.0, memory=1.0)


def tiny(**changes: object) -> ModelConfig:
    """Two layers of width 8: 192 weights of qkv and o, 384 of the feed-forward part, each."""
    fields: dict[str, object] = {
        "family": "llama",
        "vocab_size": 100,
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_size": 4,
        "layers": (LayerKind(), LayerKind()),
        "max_position": 4096,
    }
    return ModelConfig(**{**fields, **changes})  # type: ignore[arg-type]


def model_of(config: ModelConfig, **options: object) -> CostModel:
    settings: dict[str, object] = {"page_size": 4, "efficiency": IDEAL, **options}
    return CostModel(Footprint.of(config), CHIP, **settings)  # type: ignore[arg-type]


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_parameters_are_counted() -> None:
    footprint = Footprint.of(tiny())
    # A layer: qkv (2 + 1 + 1) x 4 x 8, o 8 x 8, gate and up 2 x 16 x 8, down 8 x 16, two norms of 8.
    assert footprint.dense_weights == 2 * (128 + 64 + 256 + 128)
    assert footprint.num_parameters == footprint.dense_weights + 2 * 16 + 100 * 8 + 8
    assert Footprint.of(tiny(tie_embeddings=False)).num_parameters == footprint.num_parameters + 800
    assert footprint.weight_bytes("bfloat16") == 2 * footprint.num_parameters


@pytest.mark.parametrize(
    ("name", "parameters"),
    [  # as their model cards and checkpoints say
        ("smollm2-135m", 134515008),
        ("llama-3.1-8b", 8030261248),
        ("llama-3.1-70b", 70553706496),
        ("mixtral-8x7b", 46702792704),
        ("qwen3-30b-a3b", 30532122624),
    ],
)
def test_known_models_have_their_known_sizes(name: str, parameters: int) -> None:
    assert Footprint.of(MODELS[name]).num_parameters == parameters


def test_active_weights_of_a_mixture() -> None:
    footprint = Footprint.of(MODELS["qwen3-30b-a3b"])
    active = footprint.active_weights() + 2 * footprint.head_weights
    assert active / 1e9 == pytest.approx(3.35, abs=0.05)  # "A3B": 3.3 G activated
    assert footprint.touched_weights(1) == pytest.approx(footprint.active_weights())
    # Each of 128 experts is missed by one row with probability 15/16.
    missed = (15 / 16) ** 64
    assert footprint.touched_weights(64) == pytest.approx(
        footprint.dense_weights + footprint.expert_weights * (1 - missed)
    )


@pytest.mark.parametrize("kv_format", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("head_size", [32, 64, 96, 128, 256])
def test_a_page_takes_what_the_engine_makes_it_take(head_size: int, kv_format: str) -> None:
    layers = (LayerKind(), LayerKind(window=64), LayerKind(window=64))
    footprint = Footprint.of(tiny(head_size=head_size, num_kv_heads=2, layers=layers))
    for window, num_layers in ((0, 1), (64, 2)):
        layout = PageLayout(64, 2, head_size, 7, kv_format, kv_format)
        assert 7 * footprint.page_bytes(kv_format, 64, window) == layout.num_bytes(num_layers)


def test_bytes_of_a_token() -> None:
    llama = Footprint.of(MODELS["llama-3.1-8b"])
    assert llama.kv_token_bytes("bfloat16") == 2 * 32 * 8 * 128 * 2
    assert llama.page_bytes("bfloat16", 64) == 64 * llama.kv_token_bytes("bfloat16")
    smol = Footprint.of(tiny(head_size=32))  # keys and values fill 64 lanes each
    assert smol.page_bytes("bfloat16", 1) == 2 * smol.kv_token_bytes("bfloat16")
    with pytest.raises(ValueError, match="KV format 'fp5' is not one of float32"):
        llama.kv_token_bytes("fp5")


def test_a_decode_step_by_hand() -> None:
    cost = model_of(tiny()).cost(StepShape(4, 4, 4, decode=True), ints(7, 8, 0), ints(1, 1, 1))
    # Weights 1152 x 2 bytes at 1 GB/s outlast their arithmetic, 2 x 1152 x 4 rows at 1 TFLOP/s.
    assert cost.matrices == pytest.approx(2304e-9)
    # Pages of 4: contexts of 8, 9 and 1 tokens are read as 8, 12 and 4, and 3 are written; a token's key and
    # value take 128 lanes of 2 bytes in each of two layers.
    assert cost.attention == pytest.approx((8 + 12 + 4 + 3) * 128 * 2 * 2 * 1e-9)
    # The head's 800 weights, and 4 rows of 100 float32 logits twice.
    assert cost.head == pytest.approx((800 * 2 + 2 * 4 * 4 * 100) * 1e-9)
    assert cost.collectives == 0.0
    assert cost.seconds == pytest.approx(cost.matrices + cost.attention + cost.head + 1e-3)


def test_a_long_chunk_is_bound_by_arithmetic() -> None:
    big = tiny(hidden_size=1024, intermediate_size=4096, head_size=128, num_heads=32, num_kv_heads=1)
    model = model_of(big)
    cost = model.cost(StepShape(4096, 1, 1), ints(1000), ints(3000))
    footprint = Footprint.of(big)
    assert cost.matrices == pytest.approx(2 * footprint.dense_weights * 4096 / 1e12)
    pairs = sum(range(1001, 4001))
    assert cost.attention == pytest.approx(2 * 4 * 32 * 128 * pairs / 1e12)
    assert model.step_seconds(StepShape(4096, 1, 1), ints(1000), ints(3000)) == cost.seconds


def test_a_window_bounds_what_is_read_and_multiplied() -> None:
    cost = model_of(tiny(layers=(LayerKind(window=8),) * 2))
    decode = cost.cost(StepShape(1, 1, 1, decode=True), ints(100), ints(1))
    # Positions 93 to 100 lie on the pages 23 to 25.
    assert decode.attention == pytest.approx((12 + 1) * 128 * 2 * 2 * 1e-9)
    wide = tiny(layers=(LayerKind(window=8),) * 2, num_heads=4096, head_size=128)
    chunk = model_of(wide).cost(StepShape(64, 1, 1), ints(4), ints(60))
    pairs = sum(min(position + 1, 8) for position in range(4, 64))
    assert chunk.attention == pytest.approx(2 * 4 * 4096 * 128 * pairs / 1e12)


def test_chips_divide_the_work_and_pay_for_their_sums() -> None:
    config = tiny(num_heads=4, num_kv_heads=2)
    shape = StepShape(4, 4, 4, decode=True)
    one = model_of(config).cost(shape, ints(7, 8, 0), ints(1, 1, 1))
    four = model_of(config, mesh=ChipMesh(tensor=4)).cost(shape, ints(7, 8, 0), ints(1, 1, 1))
    assert four.matrices == pytest.approx(one.matrices / 4)
    assert four.head == pytest.approx(one.head / 4)
    assert four.attention == pytest.approx(one.attention / 2)  # two KV heads cannot go on four chips
    ring = 2 * 3 / 4 * 4 * 8 * 2 / 1e8
    # Two in each layer, and one of the embedding.
    assert four.collectives == pytest.approx((2 * 2 + 1) * (ALL_REDUCE_LATENCY + ring))


def test_formats_change_traffic_and_arithmetic() -> None:
    shape = StepShape(1, 1, 1, decode=True)
    half = model_of(tiny()).cost(shape, ints(0), ints(1))
    byte = model_of(tiny(), weight_format="int8", compute_format="int8").cost(shape, ints(0), ints(1))
    assert byte.matrices == pytest.approx(half.matrices / 2)
    big = tiny(hidden_size=4096, intermediate_size=4096)
    rows = StepShape(4096, 1, 1)
    wide = model_of(big).cost(rows, ints(0), ints(4096))
    narrow = model_of(big, weight_format="int8", compute_format="int8").cost(rows, ints(0), ints(4096))
    assert narrow.matrices == pytest.approx(wide.matrices / 2)


def test_what_cannot_be_is_refused() -> None:
    footprint = Footprint.of(tiny())
    with pytest.raises(ValueError, match="weight format 'int3' is not one of float32"):
        CostModel(footprint, CHIP, weight_format="int3")
    with pytest.raises(ValueError, match="page_size 48 is not a power of two"):
        CostModel(footprint, CHIP, page_size=48)
    with pytest.raises(ValueError, match="mesh tensor=2 is out of range for cpu-2-cores"):
        CostModel(footprint, find_chip("cpu-2-cores"), mesh=ChipMesh(tensor=2))
    with pytest.raises(ValueError, match=r"efficiency memory 1\.5 is not above 0"):
        Efficiency(memory=1.5)
    with pytest.raises(ValueError, match="chip 'v9' is not one of v5e"):
        find_chip("v9")
    with pytest.raises(ValueError, match="model 'gpt-9' is neither one of"):
        find_model("gpt-9")


def test_every_chip_has_a_source_and_can_multiply() -> None:
    for name, chip in CHIPS.items():
        assert chip.name == name
        assert chip.source
        assert chip.peak("bfloat16") > 0
        assert chip.peak("int8") >= chip.peak("int4")
        with pytest.raises(ValueError, match="'fp5' is not one of"):
            chip.peak("fp5")


def test_a_plausible_machine() -> None:
    """An 8B model on an H100: 71 to 76 % of the bandwidth were measured for one stream (158 tokens/s)."""
    cost = CostModel(Footprint.of(MODELS["llama-3.1-8b"]), find_chip("h100"))
    seconds = cost.step_seconds(StepShape(1, 1, 1, decode=True), ints(500), ints(1))
    assert 1 / seconds == pytest.approx(158, rel=0.1)


def test_the_measured_cpu() -> None:
    """One stream and one long prompt, as benchmarks.offline measured them on that machine."""
    results = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "offline-cpu-2-cores.json"
    measured = json.loads(results.read_text())["rates"]["jaxserve"]
    formats: dict[str, Any] = {
        "weight_format": "float32",
        "kv_format": "float32",
        "compute_format": "float32",
    }
    cost = CostModel(Footprint.of(MODELS["smollm2-135m"]), find_chip("cpu-2-cores"), page_size=16, **formats)
    decode = cost.step_seconds(StepShape(1, 1, 1, decode=True), ints(96), ints(1))
    assert 1 / decode == pytest.approx(measured["decode 1"], rel=0.15)
    chunks = [cost.step_seconds(StepShape(256, 16, 16), ints(at), ints(256)) for at in (0, 256)]
    assert 512 / sum(chunks) == pytest.approx(measured["prefill"], rel=0.15)
