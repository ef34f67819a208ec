"""Quantised checkpoints against the packages that write and load them, where these are installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.engine.parameters import as_weights, place_parameters
from jaxserve.weights import open_checkpoint
from tests.engine.forward import PromptForward
from tests.oracle.tiny_models import write_tiny_model
from tests.weights.packers import Module, Packer
from tests.weights.quantised_models import CASES, Case, compressed, quantise_folder, write_model

pytestmark = [
    pytest.mark.oracle,
    # Of torch and transformers themselves.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning"),
]

SCHEMES: dict[str, tuple[str, dict[str, Any]]] = {
    "int4 groups": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}),
    "int4 zeros": (
        "pack-quantized",
        {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False},
    ),
    "int4 channels": ("pack-quantized", {"num_bits": 4, "strategy": "channel"}),
    "int8 groups": ("pack-quantized", {"num_bits": 8, "strategy": "group", "group_size": 32}),
    "int8 channels": ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
    "int8 tensor": ("int-quantized", {"num_bits": 8, "strategy": "tensor"}),
    "fp8 channels": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "fp8 tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    "fp8 blocks": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 32]},
    ),
}


def written_by_the_package(layout: str, weights: dict[str, Any]) -> tuple[Packer, dict[str, Any]]:
    """Modules as compressed-tensors compresses and decompresses them, and its own dump of the scheme."""
    pytest.importorskip("compressed_tensors")
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    arguments = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    compressor = BaseCompressor.get_value_from_registry(layout)

    def pack(shape: tuple[int, int], rng: np.random.Generator) -> Module:
        weight = torch.from_numpy(rng.standard_normal(shape).astype(np.float32) * 0.05)
        if arguments.strategy == "block":
            blocks = weight.reshape(shape[0] // 32, 32, shape[1] // 32, 32)
            low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
        else:
            run = arguments.group_size if arguments.strategy == "group" else shape[1]
            runs = weight.reshape(shape[0], -1, run)
            low, high = runs.amin(-1), runs.amax(-1)
            if arguments.strategy == "tensor":
                low, high = low.amin().reshape(1), high.amax().reshape(1)
        scale, zero = calculate_qparams(low, high, arguments)
        state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
        tensors = compressor.compress(state, scheme)
        number = compressor.decompress(tensors, scheme)["weight"].float().numpy()
        return {name: _numpy(tensor) for name, tensor in tensors.items()}, number

    return pack, json.loads(arguments.model_dump_json())


def _numpy(tensor: Any) -> np.ndarray:
    import ml_dtypes
    import torch

    if tensor.dtype == torch.float8_e4m3fn:
        return tensor.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
    return np.ascontiguousarray(tensor.numpy())


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_modules_that_compressed_tensors_wrote(
    family: str, name: str, tiny_config, random_tensors, canonical, write_hf
) -> None:
    layout, weights = SCHEMES[name]
    packer, dumped = written_by_the_package(layout, weights)
    config = tiny_config(family)
    case = Case(packer, compressed(dumped, layout))
    model = write_model(config, random_tensors(config), case, write_hf, canonical)
    checkpoint = open_checkpoint(model.folder)
    assert checkpoint.stored is not None
    assert not checkpoint.stored.widened
    for parameter, array in checkpoint.read("float32"):
        np.testing.assert_allclose(array, model.expected[parameter], rtol=1e-6, err_msg=parameter)


@pytest.mark.parametrize(
    ("case", "rtol"),
    # Where scales are bfloat16, or nothing but bfloat16 is asked for, the others widen to that.
    [("fp8 blocks", 2**-8), ("ct int4 zeros", 1e-6), ("ct int8 rows", 1e-6), ("ct fp8", 2**-7)],
)
def test_transformers_loads_the_same_numbers(case: str, rtol: float, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    if case.startswith("ct"):
        pytest.importorskip("compressed_tensors")
    source = write_tiny_model("llama_mha", tmp_path / "source")
    folder = quantise_folder(source, tmp_path, CASES[case])
    config = transformers.AutoConfig.from_pretrained(folder)
    if case.startswith("ct"):
        config.quantization_config["run_compressed"] = False
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32)
    checkpoint = open_checkpoint(folder)
    down = dict(checkpoint.read("float32"))["layers.1.down"]
    weight = dict(loaded.state_dict())["model.layers.1.mlp.down_proj.weight"]
    np.testing.assert_allclose(weight.float().numpy(), down, rtol=rtol)
    if case != "ct int4 zeros":  # which is float32 throughout, and computes with what it stores
        return
    prompt = np.array([1, 17, 200, 3, 90, 41, 5])
    with torch.no_grad():
        theirs = loaded(torch.from_numpy(prompt[None])).logits[0].numpy()
    params = place_parameters(as_weights(checkpoint.read_stored("float32")), checkpoint.config, "switched")
    (ours,) = PromptForward(checkpoint.config, [prompt]).logits(params)
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
