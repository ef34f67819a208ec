"""How much sooner does a converted model start? `python -m benchmarks.start`

Reads a model's weights onto the device, from safetensors with a recipe and from a folder that `jaxserve
convert` wrote with the same recipe: in turns, each time in a process that does nothing else. Counted are the
seconds of the process from its start to its end, imports included, and of these the ones until the weights
are in memory. Warm: the files are in the system's cache. Cold: they were dropped from it (`posix_fadvise`).
Prints the best of several rounds, and the ratio. Exit status 1 if a warm start has the weights less than
three times as fast.

Without MODEL it writes one: random numbers in the shape of a Llama of a billion parameters, in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from benchmarks.machine import describe
from jaxserve.converted import convert
from jaxserve.quantization import recipe_named
from jaxserve.weights import open_checkpoint

FLOOR = 3.0
CACHES = ("warm", "cold")
SOURCE, CONVERTED = "safetensors", "converted"
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}

_PROGRAM = """
import sys, time
from pathlib import Path
import jax
from jaxserve.engine.build import configure, load_parameters
from jaxserve.engine.options import EngineOptions
from jaxserve.weights import open_any_checkpoint

began = time.perf_counter()
checkpoint = open_any_checkpoint(Path(sys.argv[1]))
config = configure(checkpoint, EngineOptions(quantize=sys.argv[2], max_model_len=256, num_slots=1))
jax.block_until_ready(load_parameters(checkpoint, config))
print(time.perf_counter() - began)
"""


@dataclass(frozen=True)
class Start:
    """Of one process, in seconds."""

    whole: float
    """From its start to its end."""
    weights: float
    """Of these, until the weights were in memory."""


@dataclass
class Report:
    """Everything that one run found."""

    machine: str
    model: str
    quantize: str
    source_bytes: int
    converted_bytes: int
    starts: dict[str, list[Start]] = field(default_factory=dict)
    """By the state of the cache and what was started from."""

    def best(self, case: str) -> Start:
        runs = self.starts[case]
        return Start(min(run.whole for run in runs), min(run.weights for run in runs))


def write_model(folder: Path) -> Path:
    """The random Llama."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    random = np.random.default_rng(0)
    hidden, width, kv = LLAMA["hidden_size"], LLAMA["intermediate_size"], 8 * LLAMA["head_dim"]

    def matrix(*shape: int) -> np.ndarray:
        return (0.02 * random.standard_normal(shape, np.float32)).astype(ml_dtypes.bfloat16)

    ones = np.ones(hidden, ml_dtypes.bfloat16)
    tensors = {"model.embed_tokens.weight": matrix(LLAMA["vocab_size"], hidden), "model.norm.weight": ones}
    for number in range(LLAMA["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}.{norm}.weight"] = ones.copy()
        for name, rows in (("q", hidden), ("k", kv), ("v", kv), ("o", hidden)):
            tensors[f"{layer}.self_attn.{name}_proj.weight"] = matrix(rows, hidden)
        for name in ("gate", "up"):
            tensors[f"{layer}.mlp.{name}_proj.weight"] = matrix(width, hidden)
        tensors[f"{layer}.mlp.down_proj.weight"] = matrix(hidden, width)
    save_file(tensors, folder / "model.safetensors")
    return folder


def measure(folder: Path, quantize: str, *, warm: bool) -> Start:
    """One start, with the files in the system's cache or out of it."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                if warm:
                    while file.read(2**24):
                        pass
                else:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    began = time.perf_counter()
    command = [sys.executable, "-c", _PROGRAM, str(folder), quantize]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return Start(time.perf_counter() - began, float(output))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.start", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "model", nargs="?", type=Path, help="a folder with safetensors; by default random numbers"
    )
    parser.add_argument("--quantize", default="int8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = args.model or write_model(Path(scratch) / "model")
        converted = Path(scratch) / "converted"
        convert(open_checkpoint(model), converted, recipe=recipe_named(args.quantize))
        name, sizes = str(args.model or "a random Llama"), (_size(model), _size(converted))
        report = Report(describe(), name, args.quantize, *sizes)
        for folder in (model, converted):  # What either compiles is in the compilation cache from here on.
            measure(folder, args.quantize, warm=True)
        for _ in range(args.rounds):
            for cache in CACHES:
                for name, folder in ((SOURCE, model), (CONVERTED, converted)):
                    start = measure(folder, args.quantize, warm=cache == CACHES[0])
                    report.starts.setdefault(f"{cache}, {name}", []).append(start)
    _print(report)
    if args.json:
        args.json.write_text(json.dumps(asdict(report), indent=1) + "\n")
    return 0 if _ratios(report, CACHES[0])[1] >= FLOOR else 1


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _ratios(report: Report, cache: str) -> tuple[float, float]:
    """Of whole starts, and of the weights' part."""
    source, converted = (report.best(f"{cache}, {name}") for name in (SOURCE, CONVERTED))
    return source.whole / converted.whole, source.weights / converted.weights


def _print(report: Report) -> None:
    print(f"machine    {report.machine}")
    sizes = (
        f"{report.source_bytes / 1e9:.2f} GB as {SOURCE}, {report.converted_bytes / 1e9:.2f} GB {CONVERTED}"
    )
    print(f"model      {report.model}, {sizes}, --quantize {report.quantize}")
    print(f"{'cache, from':20}  {'process':>8}  {'weights':>8}")
    for cache in CACHES:
        for name in (SOURCE, CONVERTED):
            best = report.best(f"{cache}, {name}")
            print(f"{f'{cache}, {name}':20}  {best.whole:6.2f} s  {best.weights:6.2f} s")
        whole, weights = _ratios(report, cache)
        print(f"{'  ratio':20}  {whole:8.2f}  {weights:8.2f}")


if __name__ == "__main__":
    sys.exit(main())
