"""One complete step of a model that has every kind of layer, compiled from shapes alone."""

from __future__ import annotations

import functools
import math
import time
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.config import CacheConfig, EngineConfig, LayerKind, ModelConfig
from jaxserve.engine.parameters import abstract_parameters
from jaxserve.engine.shardings import parameter_shardings, state_shardings
from jaxserve.engine.state import make_state
from jaxserve.engine.step import PlanFormat, run_step
from jaxserve.model.cache import page_layouts
from jaxserve.model.parameters import layer_parameters
from jaxserve.model.transformer import Transformer
from jaxserve.plan import StepPlan, StepShape
from pallas_kernels import dispatch as kernels
from tests.compilers.hlo import whole_copies
from tests.compilers.targets import Target, target_mesh

SLOTS, PAGE, WINDOW, MAX_LEN = 64, 64, 1024, 16384
DECODE = StepShape(SLOTS, SLOTS, SLOTS, decode=True)
CHUNK = StepShape(1024, SLOTS, SLOTS)

WINDOWED = LayerKind(window=WINDOW)
FULL = LayerKind(rope_theta=1e6)
EXPERTS = LayerKind(rope_theta=1e6, experts=True)

MODEL = ModelConfig(
    family="spike",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_heads=32,
    num_kv_heads=8,
    head_size=128,
    # Two segments: a Gemma-style pattern twice, and a run of expert layers.
    layers=((WINDOWED,) * 5 + (FULL,)) * 2 + (EXPERTS,) * 6,
    max_position=131072,
    qk_norm=True,
    post_norms=True,
    tie_embeddings=False,
    num_experts=64,
    experts_per_token=8,
    expert_intermediate_size=768,
)

CONFIG = EngineConfig(
    model=MODEL,
    cache=CacheConfig(
        page_size=PAGE,
        # What all slots can hold: the window group a window and the largest chunk each.
        num_pages=(SLOTS * (WINDOW + CHUNK.rows + PAGE) // PAGE, SLOTS * MAX_LEN // PAGE),
        kv_format="int8",
    ),
    max_model_len=MAX_LEN,
    num_slots=SLOTS,
    decode_rows=(DECODE.rows,),
    chunk_rows=(CHUNK.rows,),
    compute_format="bfloat16",
)


@dataclass(frozen=True)
class Measured:
    """What a compiler says of one step. Bytes are those of one device."""

    target: str
    attention: str
    """The implementation that was chosen for it."""
    rows: int
    compile_seconds: float
    arguments: int
    cache: int
    temporaries: int
    aliased: int
    copies: tuple[str, ...]
    """Instructions that write out a weight, a layer's slice of a stack of them, or a pool anew."""

    @property
    def temporaries_share(self) -> float:
        """Of the cache's bytes."""
        return self.temporaries / self.cache


def compile_spike(target: Target, shape: StepShape) -> Measured:
    """Compile the step of one shape for a target."""
    layouts = page_layouts(CONFIG, target.backend)
    form = PlanFormat(shape, len(layouts), CONFIG.num_slots, CONFIG.cache.page_size)
    vector = form.pack(StepPlan.of((), (), shape))
    params = abstract_parameters(MODEL, CONFIG.compute_format, target.layer_loop)
    state = jax.eval_shape(functools.partial(make_state, CONFIG, layouts))
    with target_mesh(target) as mesh:
        transformer = Transformer(
            CONFIG, layouts, target.layer_loop, mesh, kernels.Target.of(mesh.devices.flat[0])
        )
        params = placed(params, parameter_shardings(params, MODEL, mesh))
        state_places = state_shardings(state, mesh)
        state = placed(state, state_places)
        everywhere = NamedSharding(mesh, PartitionSpec())
        step = jax.jit(
            functools.partial(run_step, transformer, form),
            donate_argnums=1,
            out_shardings=(state_places, everywhere),
        )
        started = time.monotonic()
        with kernels.choices_recorded() as chosen:
            compiled = step.lower(params, state, placed(vector, everywhere)).compile()
        seconds = time.monotonic() - started
    memory = compiled.memory_analysis()
    assert memory is not None
    return Measured(
        target=target.name,
        attention=chosen["ragged_paged_attention"],
        rows=shape.rows,
        compile_seconds=seconds,
        arguments=memory.argument_size_in_bytes,
        cache=sum(math.prod(shard_shape(x)) * x.dtype.itemsize for x in jax.tree.leaves(state.cache)),
        temporaries=memory.temp_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        copies=whole_copies(
            str(compiled.as_text()),
            # Hidden states happen to be as many numbers as one of the stacks in the larger step.
            weight_sizes(params) - {shape.rows * MODEL.hidden_size},
            in_place={math.prod(shard_shape(group.pool)) for group in state.cache},
        ),
    )


def placed(shapes: Any, shardings: Any) -> Any:
    """A tree of shapes with the shardings of another."""
    return jax.tree.map(
        lambda shape, sharding: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding),
        shapes,
        shardings,
    )


def weight_sizes(params: Any) -> set[int]:
    """Elements of one device's part of each matrix, and of each layer's slice where they are stacked."""
    sizes = {math.prod(shard_shape(params[name])) for name in ("embed", "head")}
    for segment, positions in zip(MODEL.segments, params["segments"], strict=True):
        for kind, entries in zip(segment.pattern, positions, strict=True):
            for name, info in layer_parameters(MODEL, kind).items():
                if info.full_precision:
                    continue
                for array in jax.tree.leaves(entries[name]):
                    shape = shard_shape(array)
                    sizes |= {math.prod(shape), math.prod(shape[len(shape) - len(info.shape) :])}
    return sizes


def shard_shape(array: jax.ShapeDtypeStruct) -> tuple[int, ...]:
    """The shape of the part that one device holds."""
    assert array.sharding is not None
    return array.sharding.shard_shape(array.shape)
