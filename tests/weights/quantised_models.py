"""Tiny models whose linear modules are quantised, in every scheme that is read."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from tests.weights.packers import (
    Packer,
    awq,
    gptq,
    is_linear,
    packed,
    plain_type,
    quantise_modules,
)


@dataclass(frozen=True)
class Case:
    """A scheme: how modules are packed, and what config.json says of it."""

    packer: Packer
    config: dict[str, Any]
    formats: tuple[str, ...] | None = ()
    """Those that parameters must be kept in; None where they are widened."""
    label: str = ""


@dataclass(frozen=True)
class QuantisedModel:
    folder: Path
    tensors: Mapping[str, np.ndarray]
    """As they were written."""
    expected: Mapping[str, np.ndarray]
    """The parameters that they stand for, in float32."""


def compressed(
    weights: dict[str, Any],
    format: str = "pack-quantized",
    activations: dict[str, Any] | None = None,
    ignore: tuple[str, ...] = ("lm_head", "re:.*mlp.gate$"),
) -> dict[str, Any]:
    """A `quantization_config` of compressed-tensors as its tools write it, with one group."""
    defaults = {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": None,
        "observer": "minmax",
        "observer_kwargs": {},
    }
    group = {
        "targets": ["Linear"],
        "weights": defaults | weights,
        "input_activations": activations,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "global_compression_ratio": 1.5,
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.12.2",
        "ignore": list(ignore),
        "config_groups": {"group_0": group},
    }


def _integers(bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "int", "symmetric": True, "strategy": strategy} | more


def _activations(kind: str, **more: Any) -> dict[str, Any]:
    base = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "token", "dynamic": True}
    return base | {"group_size": None, "observer": None} | more


_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
_GPTQ = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 32,
    "desc_act": False,
    "sym": True,
    "damp_percent": 0.1,
    "true_sequential": True,
}
_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
_FLOATS = {"num_bits": 8, "type": "float", "symmetric": True}
_INV = "weight_scale_inv"

CASES: Mapping[str, Case] = {
    "awq": Case(awq(), _AWQ, ("int4-32-zeros-f32",), "awq-int4-32@1"),
    "awq bf16": Case(awq(scale_type=ml_dtypes.bfloat16), _AWQ, ("int4-32-zeros",), "awq-int4-32@1"),
    "awq rows": Case(awq(-1), _AWQ | {"group_size": -1}, ("int4-zeros",), "awq-int4@1"),
    "gptq int4": Case(gptq(), _GPTQ, ("int4-32-f32",), "gptq-int4-32@1"),
    "gptq int4 zeros": Case(
        gptq(sym=False), _GPTQ | {"sym": False}, ("int4-32-zeros-f32",), "gptq-int4-32@1"
    ),
    "gptq v2": Case(
        gptq(sym=False, version=2),
        _GPTQ | {"sym": False, "checkpoint_format": "gptq_v2"},
        ("int4-32-zeros-f32",),
        "gptq-int4-32@1",
    ),
    "gptq int8": Case(gptq(8), _GPTQ | {"bits": 8}, ("int8-weight-only-32-f32",), "gptq-int8-32@1"),
    "gptq int8 zeros": Case(
        gptq(8, sym=False),
        _GPTQ | {"bits": 8, "sym": False},
        ("int8-weight-only-32-zeros-f32",),
        "gptq-int8-32@1",
    ),
    "gptq rows": Case(gptq(group=-1), _GPTQ | {"group_size": -1, "desc_act": True}, ("int4",), "gptq-int4@1"),
    "gptq act-order": Case(gptq(act_order=True), _GPTQ | {"desc_act": True}, None, "gptq-int4-32-actorder"),
    "ct int8 rows": Case(
        plain_type("int"),
        compressed(_integers(8, "channel"), "int-quantized", _activations("int")),
        ("w8a8",),
        "compressed-tensors-int8@1",
    ),
    "ct int8 static rows": Case(
        plain_type("int", "tensor", input_scale=True),
        compressed(
            _integers(8, "tensor"), "int-quantized", _activations("int", dynamic=False, strategy="tensor")
        ),
        ("w8a8",),
        "compressed-tensors-int8@1",
    ),
    "ct int8 zeros": Case(
        plain_type("int", zeros=True),
        compressed(_integers(8, "channel", symmetric=False), "int-quantized"),
        ("int8-weight-only-zeros",),
        "compressed-tensors-int8-weight-only@1",
    ),
    "ct int8 groups": Case(
        plain_type("int", "group", block=(1, 32), scale_type=ml_dtypes.bfloat16),
        compressed(_integers(8, "group", group_size=32), "int-quantized"),
        ("int8-weight-only-32",),
        "compressed-tensors-int8-32@1",
    ),
    "ct fp8": Case(
        plain_type("float", scale_type=ml_dtypes.bfloat16),
        compressed(_FLOATS | {"strategy": "channel"}, "float-quantized", _activations("float")),
        ("fp8",),
        "compressed-tensors-e4m3@1",
    ),
    "ct fp8 tensor": Case(
        plain_type("float", "tensor", input_scale=True),
        compressed(
            _FLOATS | {"strategy": "tensor"},
            "float-quantized",
            _activations("float", dynamic=False, strategy="tensor"),
        ),
        ("fp8",),
        "compressed-tensors-e4m3@1",
    ),
    "ct fp8 blocks": Case(
        plain_type("float", "block", block=(48, 64)),
        compressed(_FLOATS | {"strategy": "block", "block_structure": [48, 64]}, "float-quantized"),
        ("fp8-64-f32", "fp8-32-f32"),
        "compressed-tensors-e4m3-48x64@1",
    ),
    "ct int4 groups": Case(
        packed(),
        compressed(_integers(4, "group", group_size=32)),
        ("int4-32",),
        "compressed-tensors-int4-32@1",
    ),
    "ct int4 zeros": Case(
        packed(symmetric=False, scale_type=np.float32),
        compressed(_integers(4, "group", group_size=32, symmetric=False, actorder="static")),
        ("int4-32-zeros-f32",),
        "compressed-tensors-int4-32@1",
    ),
    "ct int4 rows": Case(
        packed(group=0), compressed(_integers(4, "channel")), ("int4",), "compressed-tensors-int4@1"
    ),
    "ct int8 packed": Case(
        packed(8, 0),
        compressed(_integers(8, "channel")),
        ("int8-weight-only",),
        "compressed-tensors-int8-weight-only@1",
    ),
    "ct int8 packed zeros": Case(
        packed(8, symmetric=False),
        compressed(_integers(8, "group", group_size=32, symmetric=False)),
        ("int8-weight-only-32-zeros",),
        "compressed-tensors-int8-32@1",
    ),
    "ct act-order": Case(
        packed(act_order=True),
        compressed(_integers(4, "group", group_size=32, actorder="group")),
        None,
        "compressed-tensors-int4-32-actorder",
    ),
    "fp8 blocks": Case(
        plain_type("float", "block", scale_name=_INV),
        _FP8 | {"weight_block_size": [128, 128]},
        ("fp8-64-f32", "fp8-128-f32", "fp8-32-f32", "fp8-96-f32"),
        "fp8-e4m3-128x128@1",
    ),
    "fp8 channels": Case(plain_type("float"), _FP8, ("fp8",), "fp8-e4m3@1"),
    "fp8 tensor": Case(
        plain_type("float", "scalar", input_scale=True),
        _FP8 | {"activation_scheme": "static"},
        ("fp8",),
        "fp8-e4m3@1",
    ),
}


def write_model(
    config: dict[str, Any],
    tensors: Mapping[str, np.ndarray],
    case: Case,
    write: Callable[..., Path],
    canonical: Callable[..., Mapping[str, np.ndarray]],
    *,
    chosen: Callable[[str, tuple[int, ...]], bool] = is_linear,
    packer_of: Callable[[str], Packer] | None = None,
    drop: str | None = None,
    add: Mapping[str, np.ndarray] | None = None,
    change: tuple[str, Callable[[np.ndarray], np.ndarray]] | None = None,
    edit: Mapping[str, Any] | None = None,
) -> QuantisedModel:
    """Write a model in a scheme, faulty if asked.

    Args:
        config: config.json, without a quantization_config.
        tensors: the plain model; its linear modules are drawn anew.
        case: the scheme.
        write: writes config and tensors to a folder.
        canonical: the parameters of plain tensors.
        chosen: which modules are quantised.
        packer_of: another packer for some modules, by name.
        drop: a tensor to leave out.
        add: further tensors.
        change: a tensor, and what becomes of it.
        edit: settings by their place, `quantization_config.x`, `group.x`, `weights.x` or `activations.x`.
    """
    if packer_of is None:
        stored, exact = quantise_modules(tensors, case.packer, chosen)
    else:
        stored, exact = dict(tensors), dict(tensors)
        for name in tensors:
            one = packer_of(name.removesuffix(".weight"))
            if chosen(name, tensors[name].shape):
                own, plain = quantise_modules({name: tensors[name]}, one, chosen)
                del stored[name]
                stored, exact = stored | own, exact | plain
    stored |= dict(add or {})
    if drop:
        del stored[drop]
    if change:
        stored[change[0]] = change[1](stored[change[0]])
    quantisation = copy.deepcopy(case.config)
    for place, value in (edit or {}).items():
        section, _, key = place.partition(".")
        _section(quantisation, section)[key] = value
    folder = write(config | {"quantization_config": quantisation}, stored)
    return QuantisedModel(folder, stored, canonical(config, exact))


def _section(quantisation: dict[str, Any], name: str) -> dict[str, Any]:
    if name == "quantization_config":
        return quantisation
    group = quantisation["config_groups"]["group_0"]
    return {"group": group, "weights": group["weights"], "activations": group["input_activations"]}[name]


def quantise_folder(source: Path, target: Path, case: Case) -> Path:
    """A copy of a model's folder with its linear modules drawn anew in a scheme.

    `target / "stored"`, which is returned, has them quantised; `target / "plain"` has them in float32.
    """
    config = json.loads((source / "config.json").read_text())
    tensors: dict[str, np.ndarray] = {}
    for file in sorted(source.glob("*.safetensors")):
        tensors |= load_file(file)
    stored, exact = quantise_modules(tensors, case.packer)
    for name, content, own in (
        ("stored", stored, {"quantization_config": case.config}),
        ("plain", exact, {}),
    ):
        folder = target / name
        folder.mkdir(parents=True)
        for file in source.glob("*token*"):
            shutil.copy(file, folder)
        (folder / "config.json").write_text(json.dumps(config | own))
        save_file(content, folder / "model.safetensors")
    return target / "stored"
