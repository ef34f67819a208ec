"""Run by tests in a process with eight CPU devices: answers of small engines on one device and on meshes.

    python -m tests.sharding.engines dense moe ...

Prints one JSON object: for each model and mesh the answers, the collectives of a decode step and what every
device holds.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jaxserve.config import EngineConfig, LayerKind, ModelConfig
from jaxserve.engine.build import layer_loop_for, local_target, resolve_here
from jaxserve.engine.collectives import collectives
from jaxserve.engine.engine import DeviceEngine
from jaxserve.engine.mesh import mesh_of
from jaxserve.engine.options import EngineOptions
from jaxserve.engine.parameters import place_parameters, quantised
from jaxserve.engine.placement import to_shards
from jaxserve.engine.programs import abstract_engine, compile_programs
from jaxserve.engine.step import PlanFormat
from jaxserve.loop import HostLoop
from jaxserve.model.parameters import model_parameters
from jaxserve.plan import SamplingParams
from jaxserve.quantization import recipe_in_force
from jaxserve.scheduling import CacheIdentity
from sharding import make_mesh
from tests.engine.models import serve
from tests.policies import UNFORESEEN

NUM_NEW = 12
ROWS = 4
"""Slots of all replicas, each with a row in a decode step, or in one of as many as there are stages."""
SETTINGS: dict[str, Any] = {
    "num_slots": ROWS,
    "max_model_len": 128,
    "max_chunk": 32,
    "num_pages": 24,
    "max_logprobs": 4,
}
DENSE = ModelConfig(
    family="tiny",
    vocab_size=256,
    hidden_size=48,
    intermediate_size=64,
    num_heads=16,
    num_kv_heads=8,
    head_size=16,
    layers=(LayerKind(),) * 2,
    max_position=256,
    qkv_bias=True,
)
EXPERTS = (LayerKind(experts=True),)


@dataclasses.dataclass(frozen=True)
class Case:
    """One model, and the meshes on which it must answer as on one device."""

    model: ModelConfig
    meshes: tuple[str, ...]
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)


MIXED = dataclasses.replace(
    DENSE,
    num_kv_heads=2,
    layers=(LayerKind(window=12), *EXPERTS) * 5,
    qk_norm=True,
    tie_embeddings=False,
    num_experts=8,
    experts_per_token=3,
    expert_intermediate_size=24,
)
"""Few KV heads, windows and experts: what is wrong in one part is wrong in its answers. Two stages have three
and two of its five repetitions, four have two or one."""
# In float32 every axis alone, and every two together. "mixed" has tensor 2, 4, 8, pipe 2, 4, expert 4
# and each two of these. With data it is each kind of model: alone in "dense", "replicas of windows" and
# "moe", with tensor there and in "shared experts", with expert in "moe", with pipe in `groups.py`.
# Dense models without the rest are in `test_jobs.py` (a process for each device), `test_golden.py` and
# `groups.py`.
CASES = {
    "mixed": Case(MIXED, ("tensor=2", "tensor=4", "tensor=8", "pipe=2", "pipe=4"), {"host_kv_memory": 2**20}),
    "mixed along two axes": Case(
        MIXED,
        ("expert=4", "tensor=2,pipe=4", "tensor=2,expert=4", "expert=4,pipe=2"),
        {"host_kv_memory": 2**20},
    ),
    # Two KV heads, which eight devices have four times each.
    "dense": Case(
        dataclasses.replace(DENSE, num_kv_heads=2, tie_embeddings=False),
        ("data=2", "data=4,tensor=2"),
    ),
    "windowed": Case(
        dataclasses.replace(DENSE, layers=(LayerKind(window=12), LayerKind()), qk_norm=True),
        ("tensor=2",),
        {"host_kv_memory": 2**20},
    ),
    # So few pages in each replica that requests must give way to others.
    "replicas of windows": Case(
        dataclasses.replace(DENSE, layers=(LayerKind(window=12), LayerKind()), qk_norm=True),
        ("data=2", "data=2,tensor=4"),
        {"page_size": 8, "num_pages": 9},
    ),
    "moe": Case(
        dataclasses.replace(
            DENSE,
            num_kv_heads=2,
            layers=(*EXPERTS, LayerKind()),
            num_experts=8,
            experts_per_token=3,
            expert_intermediate_size=24,
        ),
        ("data=2", "data=2,expert=4"),
    ),
    # Two experts for each replica, whose four devices have slices of them.
    "shared experts": Case(
        dataclasses.replace(
            DENSE,
            layers=EXPERTS * 2,
            qk_norm=True,
            num_experts=4,
            experts_per_token=2,
            expert_intermediate_size=32,
        ),
        ("data=2,tensor=4",),
        {"max_iterations": 4},
    ),
    # The stages one after another in each step.
    "int8": Case(
        DENSE,
        ("tensor=4", "tensor=2,pipe=2"),
        {"quantize": "int8", "kv_format": "int8", "decode_groups": 1},
    ),
    # Five layers on two stages or four: some have one less than others.
    "stages": Case(
        dataclasses.replace(DENSE, num_kv_heads=2, layers=(LayerKind(),) * 5, tie_embeddings=False),
        ("tensor=2,pipe=2",),
    ),
    # Two repetitions in one stage, one in the other.
    "stages of windows": Case(
        dataclasses.replace(DENSE, layers=(LayerKind(window=12), LayerKind()) * 3),
        ("pipe=2",),
        {"host_kv_memory": 2**20},
    ),
    # The first layer is in the first stage, the other has padding there. So few pages that requests must give
    # way to others.
    "stages of experts": Case(
        dataclasses.replace(
            DENSE,
            layers=(LayerKind(), *EXPERTS * 2),
            num_experts=4,
            experts_per_token=2,
            expert_intermediate_size=24,
        ),
        ("tensor=2,expert=2,pipe=2",),
        {"page_size": 8, "num_pages": 9},
    ),
    # Four experts for eight devices, and groups of 32 or 24 inputs of which a device has eight or six.
    "int4": Case(
        dataclasses.replace(
            DENSE,
            layers=(*EXPERTS, LayerKind()),
            num_experts=4,
            experts_per_token=2,
            expert_intermediate_size=24,
        ),
        ("tensor=4,expert=2",),
        {"quantize": "int4"},
    ),
}


def main() -> None:
    """Answer the cases that the command line names."""
    assert jax.device_count() == 8
    report = {
        name: {mesh or "alone": answers(CASES[name], mesh) for mesh in (None, *CASES[name].meshes)}
        for name in sys.argv[1:]
    }
    print(json.dumps(report))


def answers(case: Case, mesh: str | None) -> dict[str, Any]:
    """Of one engine."""
    options = EngineOptions(**{**SETTINGS, **case.settings}, mesh=mesh)
    engine, params = build(case.model, options)
    loop = HostLoop(engine, cache=CacheIdentity(model="tiny", kv_format="any"), policy=UNFORESEEN)
    outputs = [output.outputs[0] for output in serve(loop, requests()) + serve(loop, requests()[:1])]
    if case.settings.get("host_kv_memory"):
        check_moves(engine)
    assert engine.compiles_after_ready == 0
    told = [output.logprobs or [] for output in outputs]
    report: dict[str, Any] = {
        "tokens": [list(output.token_ids) for output in outputs],
        "margins": [[margin(step) for step in steps] for steps in told],
        "preemptions": loop.snapshot().num_preemptions,
    }
    if mesh is not None:
        report["collectives"] = decode_collectives(engine)
        report["shares"] = shares(params)
    return report


def check_moves(engine: DeviceEngine) -> None:
    """Pages come back from the host as they went there."""
    for group in range(len(engine.limits.windows)):
        held = engine.read_pages(group, [1, 2, 3]).take()
        assert len(np.unique(held)) > 100
        engine.write_pages(group, [11, 12, 13], held)
        np.testing.assert_array_equal(engine.read_pages(group, [11, 12, 13]).take(), held)


def margin(step: Any) -> float:
    """By how much the likeliest token leads the next."""
    first, second = sorted((entry.logprob for entry in step.values()), reverse=True)[:2]
    return first - second


def build(
    model: ModelConfig,
    options: EngineOptions,
    changed: Callable[[EngineConfig], EngineConfig] = lambda config: config,
    named: Any = None,
) -> tuple[DeviceEngine, Any]:
    """An engine, and its weights as it has them; `changed`: of the config that options make. `named`: the
    weights in its format, by default random ones in float32."""
    config = resolve_here(model, options)
    config = dataclasses.replace(config, decode_rows=(config.slots_of_group,), chunk_rows=(32,))
    config = changed(config)
    mesh, recipe = mesh_of(config), recipe_in_force(config)
    layer_loop = layer_loop_for(local_target(), spread=mesh is not None)
    named = random_parameters(model) if named is None else named
    if recipe:
        named = quantised(to_shards(named, config.model, mesh), config.model, recipe, "float32")
    params = place_parameters(named, config.model, layer_loop, mesh)
    programs = compile_programs(config, layer_loop, target=local_target())
    return DeviceEngine(config, params, programs), params


def requests() -> list[tuple[list[int], SamplingParams]]:
    """More than there are slots, prompts longer than a chunk and alike ones among them."""
    greedy = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True, logprobs=4)
    penalised = dataclasses.replace(greedy, presence_penalty=0.5, repetition_penalty=1.1)
    sampled = SamplingParams(
        temperature=0.8, top_k=20, top_p=0.9, seed=3, max_tokens=NUM_NEW, ignore_eos=True
    )
    long = [(7 * i) % 250 + 3 for i in range(50)]
    return [(long, greedy), ([5, 90, 17], penalised), ([*long[:40], 9], greedy), ([44, 8], sampled)]


def random_parameters(model: ModelConfig) -> Iterator[tuple[str, np.ndarray]]:
    """Weights large enough that the answers differ from token to token."""
    rng = np.random.default_rng(0)
    for name, info in model_parameters(model):
        yield name, rng.normal(1.0 if "norm" in name else 0.0, 0.3, info.shape).astype(np.float32)


def decode_collectives(engine: DeviceEngine) -> list[tuple[str, int, int, int, bool]]:
    """Of a decode step: operation, elements that it brings, its devices, how often, and whether perhaps."""
    config = engine.config
    mesh, target = make_mesh(config.mesh), local_target()
    abstract = abstract_engine(config, layer_loop_for(target, spread=mesh is not None), target, mesh)
    form = PlanFormat.of(config, engine.limits.decode_shapes[-1])
    found = collectives(abstract.lower(form).compile().as_text() or "")
    return [(c.operation, c.num_elements, c.num_devices, times, c.conditional) for c, times in found.items()]


def shares(params: Any) -> dict[str, float]:
    """Of each parameter, by its path, the part that a device holds of it."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {
        jax.tree_util.keystr(path): math.prod(array.sharding.shard_shape(array.shape)) / array.size
        for path, array in leaves
    }


if __name__ == "__main__":
    main()
