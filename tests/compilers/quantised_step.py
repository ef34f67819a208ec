"""Compile the steps of a small quantised model for machines that are not here.

    python -m tests.compilers.quantised_step v6e-1 int8 int4

Prints a line of JSON for each step: which implementation multiplies, how often, what the compiled program
writes out that is as large as a stack of matrices, one of its layers, or either widened, and what it fetches
onto the chip that is as large as all layers' scales or zeros.
Needs the project's extra compilers-tpu, or for h200 compilers-gpu.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from typing import TYPE_CHECKING, Any

from jaxserve.config import LayerKind, ModelConfig
from jaxserve.engine.machines import COMPILER_ENVIRONMENT, Machine

if TYPE_CHECKING:
    from jaxserve.plan import StepShape

ROWS, CHUNK_ROWS, LAYERS = 8, 192, 5
KERNEL = re.compile(r'custom_call_target="(?:tpu_custom_call|mosaic_gpu_v2)"')
MODEL = ModelConfig(
    family="llama",
    vocab_size=4096,
    hidden_size=1024,
    intermediate_size=3584,
    num_heads=8,
    num_kv_heads=2,
    head_size=128,
    layers=(LayerKind(),) * LAYERS,
    max_position=1024,
    tie_embeddings=False,
)


def main() -> None:
    """Read target and recipes from the command line; compile."""
    os.environ.update(COMPILER_ENVIRONMENT)
    from jaxserve.engine.ahead import prepare_ahead
    from jaxserve.engine.ladder import chunk_shapes, decode_shapes
    from jaxserve.engine.options import EngineOptions

    machine = Machine.parse(sys.argv[1])
    for recipe in sys.argv[2:]:
        options = EngineOptions(max_model_len=1024, num_slots=ROWS, quantize=recipe, kv_memory=32 << 20)
        with machine.mesh([("tensor", machine.num_devices)]) as mesh:
            engine = prepare_ahead(MODEL, options, mesh, machine.platform, 16e9, (ROWS,), (CHUNK_ROWS,))
            for shape in decode_shapes(engine.config) + chunk_shapes(engine.config):
                print(json.dumps({"recipe": recipe, **compile_step(engine, shape)}), flush=True)


def compile_step(engine: Any, shape: StepShape) -> dict[str, Any]:
    """What one compiled step does with the matrices."""
    from jaxserve.engine.step import PlanFormat
    from pallas_kernels.dispatch import choices_recorded
    from tests.compilers.hlo import whole_copies

    with choices_recorded() as chosen:
        lowered = engine.abstract.lower(PlanFormat.of(engine.config, shape))
    text = str(lowered.compile().as_text())
    return {
        "rows": shape.rows,
        "chosen": chosen["quantised_matmul"],
        "kernels": len(KERNEL.findall(text)),
        "copies": whole_copies(text, matrix_sizes(engine.abstract.params)),
        "fetched": whole_copies(text, scale_sizes(engine.abstract.params), on_chip=True),
    }


def matrix_sizes(params: Any) -> set[int]:
    """Numbers in one device's part of each stack and of a layer of it, and of both where a byte is two; or of
    each matrix where they lie apart."""
    from jaxserve.quantization.stacked import StackedWeight
    from jaxserve.quantization.weight import QuantisedWeight

    sizes: set[int] = set()
    for entry in params["segments"][0][0].values():
        if isinstance(entry, StackedWeight):
            values = entry.values
            whole = math.prod(values.sharding.shard_shape(values.shape))
            sizes |= {size * per_byte for size in (whole, whole // LAYERS) for per_byte in (1, 2)}
        elif isinstance(entry, QuantisedWeight):
            sizes |= {math.prod(array.sharding.shard_shape(array.shape)) for array in entry.values}
    return sizes


def scale_sizes(params: Any) -> set[int]:
    """Numbers in one device's part of each stack of scales or zeros; of those as large as the norms' none."""
    from jaxserve.quantization.stacked import StackedWeight

    entries = params["segments"][0][0].values()
    stacks = [
        array
        for entry in entries
        if isinstance(entry, StackedWeight)
        for array in (entry.scales, entry.zeros)
    ]
    sizes = {math.prod(array.sharding.shard_shape(array.shape)) for array in stacks if array is not None}
    return sizes - {LAYERS * MODEL.hidden_size}


if __name__ == "__main__":
    main()
