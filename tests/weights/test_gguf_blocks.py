"""Blocks of GGUF that are kept as they are: the numbers of gguf's own dequantiser, to the bit."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np
import pytest

from jaxserve.config import EngineConfig
from jaxserve.converted import convert
from jaxserve.engine.build import configure, load_parameters
from jaxserve.engine.loading import stored_as
from jaxserve.engine.options import EngineOptions
from jaxserve.engine.parameters import abstract_parameters, as_weights, place_parameters
from jaxserve.model.transformer import LayerLoop
from jaxserve.quantization import STORED, precision_of, recipe_named
from jaxserve.quantization.weight import QuantisedWeight, dequantise
from jaxserve.weights import AnyCheckpoint, open_any_checkpoint, open_checkpoint
from jaxserve.weights.tensors import QUANTISED_ENCODINGS
from tests.engine.forward import PromptForward
from tests.quantization.oracle import stored_numbers

WRITTEN = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
"""What gguf can write itself."""
AS_SMALL = ("Q4_0", "Q4_1", "Q8_0")
"""What takes no more room than in the file."""
# Rows that blocks of 256 fit.
SIZES = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256, "num_attention_heads": 8}


def random_blocks(tensor: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Of any type: random bytes, under scales of half precision that are finite."""
    if kind == gguf.GGMLQuantizationType.F32:
        return tensor
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(abs(int(tensor.flat[0] * 1e6)))
    raw = generator.integers(0, 256, (tensor.size // block_size, block_bytes), np.uint8)
    # The scales lie at either end, by type; with a bit of the exponent cleared they are neither inf nor nan.
    for odd in (1, 3, block_bytes - 1, block_bytes - 3):
        raw[:, odd] &= 0xBB
    return raw.reshape(*tensor.shape[:-1], -1)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("kind", QUANTISED_ENCODINGS)
def test_every_type_is_kept_to_the_bit(
    kind: str, family: str, tiny_config, random_tensors, write_gguf, monkeypatch
) -> None:
    """Rows that the file permutes, and stacks of experts."""
    config = tiny_config(family, **SIZES)
    if kind not in WRITTEN:
        monkeypatch.setattr(gguf.quants, "quantize", random_blocks)
    checkpoint = open_checkpoint(write_gguf(family, config, random_tensors(config), kind))
    widened = dict(checkpoint.read("float32"))  # by gguf's dequantiser
    kept = stored_bytes = num_numbers = 0
    for name, found in as_weights(checkpoint.read_stored("float32")):
        if isinstance(found, QuantisedWeight):
            kept += 1
            num_numbers += widened[name].size
            stored_bytes += sum(array.nbytes for array in jax.tree.leaves(found))
            assert np.isfinite(widened[name]).all()
            np.testing.assert_array_equal(np.asarray(dequantise(found)), widened[name], name)
            by_definition = stored_numbers(found).astype(np.float32)
            np.testing.assert_array_equal(by_definition.reshape(widened[name].shape), widened[name], name)
        else:
            np.testing.assert_array_equal(found, widened[name], name)
    assert kept == 1 + 4 * config["num_hidden_layers"]
    if kind in AS_SMALL:
        block_size, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        assert stored_bytes == num_numbers // block_size * block_bytes


@pytest.mark.parametrize("loop", ["switched", "stacked"])
def test_programs_are_compiled_for_what_is_loaded(
    loop: LayerLoop, tiny_config, random_tensors, write_gguf
) -> None:
    config = tiny_config("qwen3_moe")
    checkpoint = open_checkpoint(write_gguf("qwen3_moe", config, random_tensors(config), "Q4_1"))
    assert checkpoint.stored is not None
    params = place_parameters(as_weights(checkpoint.read_stored("bfloat16")), checkpoint.config, loop)
    abstract = abstract_parameters(checkpoint.config, "bfloat16", loop, checkpoint.stored.recipe)
    shapes = jax.tree.map(lambda array: (array.shape, array.dtype), params)
    assert shapes == jax.tree.map(lambda array: (array.shape, array.dtype), abstract)


def config_of(checkpoint: AnyCheckpoint, **settings: Any) -> EngineConfig:
    return configure(checkpoint, EngineOptions(max_model_len=64, num_slots=1, max_chunk=16, **settings))


@pytest.mark.parametrize("kind", AS_SMALL)
def test_logits_of_kept_blocks_are_those_of_the_widened_model(
    kind: str, tiny_config, random_tensors, write_gguf
) -> None:
    config = tiny_config("llama")
    checkpoint = open_checkpoint(write_gguf("llama", config, random_tensors(config), kind))
    model = checkpoint.config
    kept = load_parameters(checkpoint, config_of(checkpoint, quantize=STORED))
    assert isinstance(kept["embed"], QuantisedWeight)
    forward = PromptForward(model, [np.arange(5, 24, dtype=np.int32), np.arange(60, 64, dtype=np.int32)])
    ours = forward.logits(kept)
    theirs = forward.logits(place_parameters(checkpoint.read("float32"), model, "switched"))
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * np.abs(other).max())


class TestWhoKeepsThem:
    @pytest.fixture
    def checkpoint(self, tiny_config, random_tensors, write_gguf):
        """A file in two types, one parameter of which has both."""
        config = tiny_config("llama")
        types = {"token_embd.weight": "Q8_0", "blk.0.attn_v.weight": "Q8_0", "blk.1.attn_v.weight": "Q8_0"}
        return open_checkpoint(write_gguf("llama", config, random_tensors(config), "Q4_1", types=types))

    def test_on_a_cpu_who_asks(self, checkpoint, tmp_path: Path) -> None:
        assert precision_of(config_of(checkpoint)) == "gguf q4_1+q8_0 -> float32"
        assert precision_of(config_of(checkpoint, quantize="int8")) == "gguf q4_1+q8_0 -> int8@2 float32"
        assert precision_of(config_of(checkpoint, quantize=STORED)) == "gguf q4_1+q8_0@1 float32, 2 widened"

    @pytest.mark.parametrize("platform", ["tpu", "gpu"])
    def test_elsewhere_who_asks_for_nothing_else(self, checkpoint, platform: str, monkeypatch) -> None:
        plain = replace(config_of(checkpoint), converted_from="")
        monkeypatch.setattr(jax, "default_backend", lambda: platform)
        for quantize, label in (
            (None, "gguf q4_1+q8_0@1 float32, 2 widened"),
            ("f32", "gguf q4_1+q8_0 -> float32"),
        ):
            assert precision_of(stored_as(plain, checkpoint, quantize)) == label

    def test_what_is_widened_is_said(self, checkpoint, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "jaxserve")
        messages = []
        for quantize in (None, STORED):
            caplog.clear()
            load_parameters(checkpoint, config_of(checkpoint, quantize=quantize))
            messages.append([(record.levelname, record.getMessage()) for record in caplog.records])
        assert messages == [
            [("INFO", "gguf q4_1+q8_0 weights are converted to float32")],
            [
                (
                    "WARNING",
                    "2 parameters of gguf q4_1+q8_0 were converted to float32 "
                    "(2: its parts are quantised differently)",
                )
            ],
        ]

    def test_a_converted_model_has_what_was_asked_for(self, checkpoint, tmp_path: Path) -> None:
        convert(checkpoint, tmp_path / "kept", recipe=recipe_named(STORED))
        convert(checkpoint, tmp_path / "widened")
        kept, widened = (open_any_checkpoint(tmp_path / name) for name in ("kept", "widened"))
        for quantize in (None, STORED):
            config = config_of(kept, quantize=quantize)
            assert precision_of(config) == "gguf q4_1+q8_0@1 float32, 2 widened"
        ours = load_parameters(kept, config)
        theirs = load_parameters(checkpoint, config_of(checkpoint, quantize=STORED))
        assert jax.tree.structure(ours) == jax.tree.structure(theirs)
        jax.tree.map(np.testing.assert_array_equal, ours, theirs)
        assert precision_of(config_of(widened)) == "gguf q4_1+q8_0 -> float32"
        with pytest.raises(
            ValueError, match=r"quantize 'stored', but the weights of .*widened are not quantised"
        ):
            config_of(widened, quantize=STORED)


def test_plain_weights_have_no_formats_to_keep(
    tiny_config, random_tensors, write_gguf, tmp_path: Path
) -> None:
    config = tiny_config("llama")
    checkpoint = open_checkpoint(write_gguf("llama", config, random_tensors(config)))
    for attempt in (
        lambda: config_of(checkpoint, quantize=STORED),
        lambda: convert(checkpoint, tmp_path / "out", recipe=recipe_named(STORED)),
    ):
        with pytest.raises(ValueError, match=r"quantize 'stored', but the weights of .* are not quantised"):
            attempt()
    assert not (tmp_path / "out").exists()
