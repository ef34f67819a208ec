"""Checkpoints that are quantised already are read into the numbers that they store, and nothing else."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxserve.quantization.weight import QuantisedWeight
from jaxserve.weights import Checkpoint, open_checkpoint
from jaxserve.weights.quantised import StoredMatrix
from tests.quantization.oracle import stored_numbers
from tests.weights import packers
from tests.weights.quantised_models import CASES, Case, QuantisedModel, compressed, write_model

FAMILIES = ("llama", "qwen3_moe")
LINEAR = ("qkv", "o", "gate_up", "down", "expert_gate_up", "expert_down")


@pytest.fixture
def written(tiny_config, random_tensors, canonical, write_hf) -> Callable[..., QuantisedModel]:
    """Writes a tiny model whose linear modules are quantised; see `write_model`."""

    def write(family: str, case: Case, **changes: Any) -> QuantisedModel:
        config = tiny_config(family, tie_word_embeddings=False, **changes.pop("settings", {}))
        return write_model(config, random_tensors(config), case, write_hf, canonical, **changes)

    return write


def stored_of(checkpoint: Checkpoint) -> dict[str, np.ndarray | StoredMatrix]:
    return dict(checkpoint.read_stored("float32"))


def assert_stands_for(matrix: StoredMatrix, expected: np.ndarray, name: str) -> None:
    """A matrix is these float32 numbers: the integers exactly, and scales that were not rounded."""
    weight = QuantisedWeight(matrix.values, matrix.scales, matrix.zeros, matrix.format)
    found = stored_numbers(weight).reshape(expected.shape)
    np.testing.assert_array_equal(found.astype(np.float32), expected, err_msg=name)


def test_of_what_is_not_needed_nothing_is_read(written) -> None:
    checkpoint = open_checkpoint(written("llama", CASES["fp8 channels"]).folder)
    expected, read = stored_of(checkpoint), checkpoint.read_stored
    shutil.rmtree(checkpoint.path)  # Reading anything fails from now on.

    def nothing(name: str, shape: tuple[int, ...]) -> tuple[slice, ...]:
        return (slice(0, 0),) * len(shape)

    found = dict(read("float32", nothing))
    assert list(found) == list(expected)
    for name, array in found.items():
        assert kinds(array) == kinds(expected[name]), name
    with pytest.raises(FileNotFoundError):
        dict(read("float32"))


def kinds(array: np.ndarray | StoredMatrix) -> list[tuple[Any, ...]]:
    arrays = [array.values, array.scales] if isinstance(array, StoredMatrix) else [array]
    return [(one.shape, one.dtype) for one in arrays]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", CASES)
def test_every_scheme_is_read_as_the_numbers_that_it_stores(name: str, family: str, written) -> None:
    case = CASES[name]
    model = written(family, case)
    checkpoint = open_checkpoint(model.folder)
    widened = dict(checkpoint.read("float32"))
    assert list(widened) == list(model.expected)
    for parameter, array in model.expected.items():
        np.testing.assert_array_equal(widened[parameter], array, err_msg=parameter)
    assert checkpoint.stored is not None
    assert checkpoint.stored.label == case.label
    for parameter, array in stored_of(checkpoint).items():
        linear = parameter.rpartition(".")[2] in LINEAR
        if not linear or case.formats is None:
            assert isinstance(array, np.ndarray)
            assert (parameter in checkpoint.stored.widened) == linear
            continue
        assert isinstance(array, StoredMatrix), parameter
        assert array.format.name in case.formats
        assert array.format == checkpoint.stored.formats[parameter]
        assert array.scales.dtype == np.dtype(array.format.scale_type)
        assert_stands_for(array, model.expected[parameter], parameter)


@pytest.mark.parametrize("scale_type", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_scales_of_groups_keep_their_precision(scale_type: Any, written) -> None:
    case = CASES["ct int4 groups"]
    model = written("llama", Case(packers.packed(scale_type=scale_type), case.config))
    matrix = stored_of(open_checkpoint(model.folder))["layers.1.o"]
    assert isinstance(matrix, StoredMatrix)
    assert matrix.scales.dtype == (ml_dtypes.bfloat16 if scale_type is ml_dtypes.bfloat16 else np.float32)
    assert_stands_for(matrix, model.expected["layers.1.o"], "o")


def test_ignored_modules_are_plain_and_what_they_split_is_widened(written) -> None:
    ignored = ("lm_head", "re:.*k_proj", "model.layers.0.mlp.down_proj")
    config = compressed(CASES["ct int4 groups"].config["config_groups"]["group_0"]["weights"], ignore=ignored)

    def chosen(name: str, shape: tuple[int, ...]) -> bool:
        plain = name.endswith("k_proj.weight") or name == "model.layers.0.mlp.down_proj.weight"
        return packers.is_linear(name, shape) and not plain

    model = written("llama", Case(packers.packed(), config), chosen=chosen)
    checkpoint = open_checkpoint(model.folder)
    assert checkpoint.stored is not None
    assert dict(checkpoint.stored.widened) == {
        "layers.0.qkv": "only some of its parts are quantised",
        "layers.1.qkv": "only some of its parts are quantised",
        "layers.1.down": "not all layers have it in the same format",
    }
    described = checkpoint.stored.describe_widened("float32")
    assert described == (
        "3 parameters of compressed-tensors-int4-32 were converted to float32 "
        "(1: not all layers have it in the same format; 2: only some of its parts are quantised)"
    )
    assert checkpoint.stored.recipe is not None
    assert checkpoint.stored.recipe.rules == (("layers.*.o", "int4-32"), ("layers.*.gate_up", "int4-32"))
    for name, array in checkpoint.read("float32"):
        np.testing.assert_array_equal(array, model.expected[name], err_msg=name)


def test_parts_with_different_schemes_are_widened(written) -> None:
    int8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    config = compressed(CASES["ct int4 groups"].config["config_groups"]["group_0"]["weights"])
    config["format"] = "mixed-precision"
    first = config["config_groups"]["group_0"] | {"format": "pack-quantized"}
    second = {"targets": ["re:.*v_proj", "re:.*up_proj"], "weights": int8, "format": "int-quantized"}
    config["config_groups"] = {"a": second, "b": first}

    def packer(shape: tuple[int, int], rng: np.random.Generator) -> packers.Module:
        raise AssertionError("each module has its own")

    model = written(
        "llama",
        Case(packer, config),
        packer_of=lambda name: (
            packers.plain_type("int") if name.endswith(("v_proj", "up_proj")) else packers.packed()
        ),
    )
    checkpoint = open_checkpoint(model.folder)
    assert checkpoint.stored is not None
    assert checkpoint.stored.name == "compressed-tensors-int4-32+int8-weight-only"
    assert set(checkpoint.stored.widened) == {
        f"layers.{i}.{name}" for i in (0, 1) for name in ("qkv", "gate_up")
    }
    assert set(checkpoint.stored.widened.values()) == {"its parts are quantised differently"}
    for name, array in checkpoint.read("float32"):
        np.testing.assert_array_equal(array, model.expected[name], err_msg=name)


@pytest.mark.parametrize("name", ["awq", "gptq int4", "fp8 blocks"])
def test_a_module_listed_as_plain_must_be(name: str, written) -> None:
    case = CASES[name]
    listed = case.config | {"modules_to_not_convert": ["self_attn.o_proj"]}
    with pytest.raises(ValueError, match=r"layers.0.self_attn.o_proj.weight (is missing|has type F8_E4M3)"):
        open_checkpoint(written("llama", Case(case.packer, listed)).folder)
    plain = written(
        "llama",
        Case(case.packer, listed),
        chosen=lambda name, shape: packers.is_linear(name, shape) and "o_proj" not in name,
    )
    assert "layers.0.o" not in open_checkpoint(plain.folder).stored.formats  # pyright: ignore


@pytest.mark.parametrize("name", CASES)
def test_every_tensor_of_a_module_is_needed(name: str, written) -> None:
    module = "model.layers.1.mlp.down_proj"

    def suffixes(model: QuantisedModel) -> list[str]:
        return [key.rpartition(".")[2] for key in model.tensors if key.startswith(f"{module}.")]

    for suffix in suffixes(written("llama", CASES[name])):
        model = written("llama", CASES[name], drop=f"{module}.{suffix}")
        with pytest.raises(ValueError, match=rf"tensor {module}\.\w+ is missing, expected with shape"):
            open_checkpoint(model.folder)


@pytest.mark.parametrize("suffix", ["weight_scale", "weight_scale_inv", "qzeros", "g_idx", "input_scale"])
@pytest.mark.parametrize("name", ["awq", "fp8 blocks", "ct int8 rows", "ct int4 groups"])
def test_surplus_tensors_are_named(name: str, suffix: str, written) -> None:
    where = "model.layers.0.self_attn.q_proj" if name != "awq" else "model.layers.0.mlp"
    model = written("llama", CASES[name])
    surplus = f"{where}.{suffix}"
    if surplus in model.tensors:
        surplus = f"model.layers.0.self_attn.qkv_proj.{suffix}"
    with pytest.raises(ValueError, match=rf"tensor {surplus} is surplus, no llama model has it"):
        open_checkpoint(written("llama", CASES[name], add={surplus: np.ones(1, np.float32)}).folder)


CONTRADICTIONS: Mapping[str, tuple[str, str, Callable[[np.ndarray], np.ndarray], str]] = {
    "transposed": (
        "awq",
        "qweight",
        lambda x: np.ascontiguousarray(x.T),
        r"qweight has shape \(16, 64\)",
    ),
    "a scale too few": (
        "gptq int4",
        "scales",
        lambda x: x[:-1],
        r"\(1, 128\), expected \(2, 128\)",
    ),
    "scales of another group": ("ct int4 groups", "weight_scale", lambda x: x[:, :1], r"expected \(128, 2\)"),
    "blocks of another size": (
        "fp8 blocks",
        "weight_scale_inv",
        lambda x: x.repeat(2, 0),
        "weight_scale_inv has shape",
    ),
    "values in floats": ("awq", "qweight", lambda x: x.astype(np.float32), "has type F32; supported: I32"),
    "int8 for fp8": ("fp8 channels", "weight", lambda x: x.view(np.int8), "has type I8; supported: F8_E4M3"),
}
"""What is wrong at the first query projection of which case, and the complaint."""


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_wrong_shapes_and_types_are_named(name: str, written) -> None:
    case, suffix, change, message = CONTRADICTIONS[name]
    key = f"model.layers.0.self_attn.q_proj.{suffix}"
    model = written("llama", CASES[case], change=(key, change))
    with pytest.raises(ValueError, match=message):
        open_checkpoint(model.folder)


READING: Mapping[str, tuple[str, str, Callable[[np.ndarray], np.ndarray], str]] = {
    "a zero under sym": (
        "gptq int4",
        "qzeros",
        lambda x: x ^ np.int32(0x30),
        r"q_proj.qzeros holds 5, expected 8 throughout: sym is true",
    ),
    "an order without desc_act": ("gptq int4", "g_idx", lambda x: x[::-1].copy(), "g_idx is not in order"),
    "a group too many": ("gptq act-order", "g_idx", lambda x: x + 1, r"g_idx holds 1 to 2, expected 0 to 1"),
    "another shape": (
        "ct int4 groups",
        "weight_shape",
        lambda x: x[::-1].copy(),
        r"shape holds \(64, 128\)",
    ),
}


@pytest.mark.parametrize("name", READING)
def test_numbers_that_contradict_the_config_are_named(name: str, written) -> None:
    case, suffix, change, message = READING[name]
    key = f"model.layers.0.self_attn.q_proj.{suffix}"
    checkpoint = open_checkpoint(written("llama", CASES[case], change=(key, change)).folder)
    with pytest.raises(ValueError, match=message):
        list(checkpoint.read_stored("float32"))
    with pytest.raises(ValueError, match=message):
        list(checkpoint.read("float32"))


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        (
            "awq",
            {"quantization_config.group_size": 24},
            r"q_proj.qweight has 64 inputs, .* group size 24",
        ),
        ("awq", {"quantization_config.bits": 8}, "bits is 8; supported: 4"),
        ("awq", {"quantization_config.version": "gemv"}, "version is 'gemv'; supported: gemm"),
        ("awq", {"quantization_config.zero_point": False}, "zero_point is False; supported: True"),
        ("awq", {"quantization_config.surprise": 1}, "surprise is 1; supported: absent"),
        ("gptq int4", {"quantization_config.bits": 3}, "bits is 3; supported: 4 or 8"),
        ("gptq int4", {"quantization_config.checkpoint_format": "marlin"}, "is 'marlin'; supported: gptq or"),
        (
            "gptq int4",
            {"quantization_config.dynamic": {"+:.*": {"bits": 8}}},
            "dynamic is .*; supported: pat",
        ),
        (
            "gptq int4",
            {"quantization_config.quant_method": "aqlm"},
            "quant_method is 'aqlm'; supported: awq",
        ),
        ("fp8 blocks", {"quantization_config.fmt": "e5m2"}, "fmt is 'e5m2'; supported: 'e4m3'"),
        ("fp8 blocks", {"quantization_config.weight_block_size": [128]}, "supported: two positive integers"),
        ("ct int4 groups", {"quantization_config.format": "nvfp4-pack-quantized"}, "format is 'nvfp4-pack"),
        ("ct int4 groups", {"quantization_config.transform_config": {"R1": 1}}, "transform_config is"),
        ("ct int4 groups", {"quantization_config.sparsity_config": {"format": "2:4"}}, "format is '2:4'"),
        ("ct int4 groups", {"weights.num_bits": 2}, "group_0.weights.num_bits is 2; supported: 4 or 8"),
        ("ct int4 groups", {"weights.strategy": "attn_head"}, "strategy is 'attn_head'; supported: group or"),
        ("ct int4 groups", {"group.input_activations": {"num_bits": 8}}, "input_activations is"),
        ("ct int8 rows", {"weights.num_bits": 4}, "num_bits is 4; supported: 8"),
        ("ct int8 rows", {"activations.symmetric": False}, "symmetric is False; supported: True"),
    ],
)
def test_what_cannot_be_read_is_refused(name: str, settings: dict[str, Any], message: str, written) -> None:
    model = written("llama", CASES[name], edit=settings)
    with pytest.raises(ValueError, match=message):
        open_checkpoint(model.folder)


def test_scales_of_a_quantised_cache_are_said_to_be_unused(written) -> None:
    case = CASES["ct int8 rows"]
    scales = {f"model.layers.{i}.self_attn.{x}_scale": np.ones(1, np.float32) for i in (0, 1) for x in "kv"}
    with pytest.raises(ValueError, match="k_scale is surplus"):
        open_checkpoint(written("llama", case, add=scales).folder)
    edit = {"quantization_config.kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    checkpoint = open_checkpoint(written("llama", case, add=scales, edit=edit).folder)
    assert checkpoint.stored is not None
    assert checkpoint.stored.notes == (
        "kv_cache_scheme and its scales are not used: the pool has its own format",
    )


def test_a_bias_that_is_zero_may_be_there(written) -> None:
    bias = "model.layers.0.mlp.down_proj.bias"
    zero, one = (np.full(64, value, np.float16) for value in (0.0, 1.0))
    open_checkpoint(written("llama", CASES["gptq int4"], add={bias: zero}).folder)
    for case, value in (("gptq int4", one), ("fp8 blocks", zero)):
        with pytest.raises(ValueError, match=f"tensor {bias} is surplus"):
            open_checkpoint(written("llama", CASES[case], add={bias: value}).folder)


def test_what_tools_note_is_no_hindrance(written) -> None:
    notes = {"format": "gemm", "checkpoint_format": "gemm", "meta": {"quantizer": ["x:1"]}, "lm_head": False}
    notes |= {"sym": False, "desc_act": False, "pack_dtype": "int32", "backend": "autoawq", "do_fuse": False}
    edit = {f"quantization_config.{key}": value for key, value in notes.items()}
    assert open_checkpoint(written("llama", CASES["awq"], edit=edit).folder).stored is not None


def test_modules_that_a_pattern_leaves_out_are_plain(written) -> None:
    model = written(
        "llama",
        CASES["gptq int4"],
        edit={"quantization_config.dynamic": {"-:.*o_proj": {}}},
        chosen=lambda name, shape: packers.is_linear(name, shape) and "o_proj" not in name,
    )
    stored = open_checkpoint(model.folder).stored
    assert stored is not None
    assert stored.recipe is not None
    assert [pattern for pattern, _ in stored.recipe.rules] == [
        "layers.*.qkv",
        "layers.*.gate_up",
        "layers.*.down",
    ]


def test_the_config_is_part_of_the_identity(written) -> None:
    """The same bytes under another version of the layout are other numbers."""
    prints = [
        open_checkpoint(written("llama", CASES["gptq int4 zeros"], edit=edit).folder).fingerprint
        for edit in ({}, {"quantization_config.checkpoint_format": "gptq_v2"})
    ]
    assert len(set(prints)) == 2


def test_a_gguf_file_says_what_its_blocks_were(tiny_config, random_tensors, write_gguf) -> None:
    config = tiny_config("qwen2")
    checkpoint = open_checkpoint(write_gguf("qwen2", config, random_tensors(config), "Q8_0"))
    assert checkpoint.stored is not None
    assert (checkpoint.stored.label, checkpoint.stored.describe_widened("float32")) == ("gguf q8_0", None)
    plain = open_checkpoint(write_gguf("qwen2", config, random_tensors(config)))
    assert plain.stored is None
