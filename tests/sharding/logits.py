"""Run by a test in a process with eight CPU devices: log-probabilities of text in bfloat16, on meshes.

    python -m tests.sharding.logits MODEL MESH... < texts.json

Prints one JSON object: by mesh those of every token of texts of token ids, one after the other; and of one
device, in bfloat16 and in float32.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from jaxserve.config import ModelConfig
from jaxserve.engine.engine import DeviceEngine
from jaxserve.engine.options import EngineOptions
from jaxserve.loop import HostLoop
from jaxserve.plan import SamplingParams
from jaxserve.scheduling import CacheIdentity
from jaxserve.weights import Checkpoint, open_checkpoint
from tests.engine.models import serve
from tests.policies import UNFORESEEN
from tests.sharding.engines import build

WINDOW = 16
"""Of every second layer, here; what a model was trained with is no matter."""


def main() -> None:
    folder, *meshes = sys.argv[1:]
    checkpoint = open_checkpoint(Path(folder))
    texts: list[list[int]] = json.load(sys.stdin)
    asked = {"float32": (None, "float32"), "alone": (None, "bfloat16")}
    asked |= {mesh: (mesh, "bfloat16") for mesh in meshes}
    print(json.dumps({name: told(checkpoint, texts, *of) for name, of in asked.items()}))


def told(checkpoint: Checkpoint, texts: list[list[int]], mesh: str | None, dtype: Any) -> list[float]:
    """By one engine, that computes prompts alone."""
    options = EngineOptions(
        mesh=mesh,
        dtype=dtype,
        kv_format=dtype,
        num_slots=4,
        max_model_len=128,
        num_pages=32,
        decode_groups=None if mesh is None else 1,
    )
    engine = engine_of(checkpoint, options, dtype)
    loop = HostLoop(engine, cache=CacheIdentity(model="tiny", kv_format="any"), policy=UNFORESEEN)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    found: list[float] = []
    for text, output in zip(texts, serve(loop, [(text, params) for text in texts]), strict=True):
        told = output.prompt_logprobs or []
        found += [step[token].logprob for token, step in zip(text, told, strict=True) if step is not None]
    return found


def engine_of(checkpoint: Checkpoint, options: EngineOptions, dtype: Any) -> DeviceEngine:
    layers = tuple(
        dataclasses.replace(kind, window=WINDOW * (number % 2))
        for number, kind in enumerate(checkpoint.config.layers[:4])
    )
    model: ModelConfig = dataclasses.replace(checkpoint.config, layers=layers)
    named = ((name, array) for name, array in checkpoint.read(dtype) if not name.startswith("layers.4."))
    engine, _ = build(
        model, options, lambda config: dataclasses.replace(config, decode_rows=(), chunk_rows=(64,)), named
    )
    return engine


if __name__ == "__main__":
    main()
