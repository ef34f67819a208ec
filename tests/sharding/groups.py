"""Run by tests in a process with eight CPU devices: groups that decode in turn, on the stages of a pipeline.

    python -m tests.sharding.groups dense windows ...

Prints one JSON object: for each model and mesh the answers, how they ended, and what was seen of the turns;
and under "programs" what the compiler made of a decode step.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxserve.config import LayerKind, ModelConfig
from jaxserve.engine.build import layer_loop_for, local_target, resolve_here
from jaxserve.engine.collectives import collectives
from jaxserve.engine.engine import DeviceEngine
from jaxserve.engine.ladder import decode_shapes
from jaxserve.engine.options import EngineOptions
from jaxserve.engine.programs import abstract_engine
from jaxserve.engine.step import PlanFormat
from jaxserve.loop import HostLoop
from jaxserve.outputs import CompletionOutput
from jaxserve.plan import PageGrant, SamplingParams, SequencePlan, SlotLoad, StepHandle, StepPlan
from jaxserve.scheduling import CacheIdentity
from sharding import make_mesh
from tests.policies import UNFORESEEN
from tests.sharding.engines import CASES, DENSE, EXPERTS, build, margin

SLOTS = 8
SETTINGS: dict[str, Any] = {
    "num_slots": SLOTS,
    "max_model_len": 128,
    "max_chunk": 32,
    "num_pages": 40,
    "page_size": 8,
    "max_logprobs": 2,
}
WINDOW = LayerKind(window=12)
ABORTED = 3
"""The request that its caller ends, when it has so many tokens:"""
ENOUGH = 5


@dataclasses.dataclass(frozen=True)
class Case:
    """One model, the meshes of its stages, and how many pages there are."""

    model: ModelConfig
    meshes: tuple[str, ...]
    num_pages: int = 40


MODELS = {
    "dense": Case(dataclasses.replace(DENSE, layers=(LayerKind(),) * 6, eos_token_ids=(9,)), ("pipe=2",)),
    # Five layers on four stages or two, a KV head for each of two devices; too few pages for all.
    "grouped queries": Case(CASES["stages"].model, ("tensor=2,pipe=4", "tensor=2,pipe=2"), 24),
    "windows": Case(
        dataclasses.replace(DENSE, layers=(WINDOW, LayerKind()) * 5, eos_token_ids=(9,)),
        ("pipe=4", "data=2,pipe=2"),
        18,
    ),
    "experts": Case(
        dataclasses.replace(
            DENSE,
            layers=(LayerKind(), *EXPERTS * 4),
            num_experts=4,
            experts_per_token=2,
            expert_intermediate_size=24,
            eos_token_ids=(9,),
        ),
        ("pipe=4", "data=2,pipe=2"),
        24,
    ),
}


class Letters:
    """The text of an answer, a letter a token; ended by any of its stop strings."""

    def __init__(self, prompt: Sequence[int], params: SamplingParams) -> None:
        self._text = ""
        self._stops = params.stop_strings
        self.stopped: str | None = None

    def push(self, token_id: int) -> str:
        letter = chr(ord("a") + token_id % 26)
        self._text += letter
        self.stopped = next((stop for stop in self._stops if self._text.endswith(stop)), None)
        return letter

    def finish(self) -> str:
        return ""


class Watched:
    """An engine whose plans are kept."""

    def __init__(self, engine: DeviceEngine) -> None:
        self._engine = engine
        self.plans: list[StepPlan] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def dispatch(self, plan: StepPlan) -> StepHandle:
        self.plans.append(plan)
        return self._engine.dispatch(plan)

    @property
    def num_in_turn(self) -> int:
        """Decode steps that others followed at once."""
        ticks = [set(plan.slots.tolist()) if plan.shape.decode else set[int]() for plan in self.plans]
        return sum(bool(one and other) and one.isdisjoint(other) for one, other in itertools.pairwise(ticks))


def main() -> None:
    """Answer the cases that the command line names."""
    assert jax.device_count() == 8
    report: dict[str, Any] = {}
    for name in sys.argv[1:]:
        if name == "programs":
            report[name] = [program(groups, stages) for stages in (2, 4) for groups in (1, stages)]
        else:
            case = MODELS[name]
            report[name] = {mesh or "alone": answers(case, mesh) for mesh in (None, *case.meshes)}
    print(json.dumps(report))


def answers(case: Case, mesh: str | None) -> dict[str, Any]:
    """Of one engine: twice, the second time with the loop that waits for each step."""
    num_pages = 12 if mesh and "data=2" in mesh else case.num_pages  # Of each replica.
    engine, _ = build(case.model, EngineOptions(**{**SETTINGS, "num_pages": num_pages}, mesh=mesh))
    watched: Any = Watched(engine)
    report: dict[str, Any] = {"again": tokens_at_once(engine)}
    for name, overlap in (("overlapped", True), ("plain", False)):
        loop = HostLoop(
            watched,
            overlap=overlap,
            cache=CacheIdentity(model="tiny", kv_format="any"),
            policy=UNFORESEEN,
            answer_text=Letters,
        )
        report[name] = [told(one) for one in served(loop, aborts=mesh is not None)]
        report[name + " preemptions"] = loop.snapshot().num_preemptions
    assert engine.compiles_after_ready == 0
    return report | {"in turn": watched.num_in_turn, "groups": engine.limits.decode_groups}


def tokens_at_once(engine: DeviceEngine) -> list[int]:
    """What a sequence samples in steps that are all started before the first is waited for."""
    limits = engine.limits
    load = SlotLoad(0, [5, 90, 17], 3, 0, ((),) * len(limits.windows), SamplingParams(temperature=0), 0, 0)
    engine.load_slot(load)
    grants = [PageGrant(group, 0, 0, 1) for group in range(len(limits.windows))]
    plans = [StepPlan.of([SequencePlan(0, 3)], grants, limits.chunk_shapes[0])]
    plans += [StepPlan.of([SequencePlan(0, 1)], (), limits.decode_shapes[-1])] * 4
    handles = [engine.dispatch(plan) for plan in plans]
    return [int(engine.collect(handle).tokens[0]) for handle in handles]


def served(loop: HostLoop, *, aborts: bool) -> list[CompletionOutput]:
    """All samples in order; requests come while others run."""
    late = dict(enumerate(requests()))
    for number in range(6):
        loop.add(str(number), *late.pop(number))
    outputs: dict[int, list[CompletionOutput]] = {}
    num_tokens = num_steps = 0
    while late or not loop.idle:
        num_steps += 1
        if late and num_steps % 7 == 0:
            number = min(late)
            loop.add(str(number), *late.pop(number))
        for delta in loop.step():
            num_tokens += len(delta.token_ids) if delta.request_id == str(ABORTED) else 0
            if delta.output is not None:
                outputs[int(delta.request_id)] = list(delta.output.outputs)
        if aborts and num_tokens >= ENOUGH and ABORTED not in outputs:
            loop.abort(str(ABORTED))
        loop.check_integrity()
    return [sample for number in sorted(outputs) for sample in outputs[number]]


def requests() -> list[tuple[list[int], SamplingParams]]:
    """Of all kinds, more than there are slots."""
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2)
    ended = dataclasses.replace(greedy, ignore_eos=False, stop_token_ids=[*range(100, 112)], max_tokens=40)
    stopped = dataclasses.replace(greedy, stop=["k"], max_tokens=40)
    penalised = dataclasses.replace(greedy, presence_penalty=0.5, repetition_penalty=1.1, min_tokens=6)
    sampled = SamplingParams(temperature=0.9, top_k=30, top_p=0.9, seed=3, max_tokens=24, ignore_eos=True)
    two = dataclasses.replace(sampled, n=2, seed=4, max_tokens=13)
    long = [(7 * i) % 250 + 3 for i in range(50)]
    return [
        (long, greedy),
        ([5, 90, 17], ended),
        ([44, 8], sampled),
        ([*long[:30], 9], dataclasses.replace(greedy, max_tokens=40)),
        ([12, 13, 14, 15], stopped),
        ([77], penalised),
        (long[:21], two),
        ([*long[:40], 9], greedy),
        ([200, 31], ended),
        ([61], dataclasses.replace(stopped, stop=["m", "zz"])),
        ([3, 4, 5, 6, 7], dataclasses.replace(sampled, seed=8, max_tokens=30)),
        (long[5:30], dataclasses.replace(greedy, max_tokens=1)),
        ([1, 2], dataclasses.replace(greedy, max_tokens=2)),
    ]


def told(output: CompletionOutput) -> dict[str, Any]:
    return {
        "tokens": list(output.token_ids),
        "text": output.text,
        "reason": output.finish_reason,
        "margins": [margin(step) for step in output.logprobs or []],
    }


def program(groups: int, stages: int) -> Mapping[str, Any]:
    """What there is in a decode step of four rows on stages of three layers each."""
    model = dataclasses.replace(DENSE, layers=(LayerKind(),) * 3 * stages)
    config = resolve_here(model, EngineOptions(**SETTINGS, mesh=f"pipe={stages}", decode_groups=groups))
    config = dataclasses.replace(config, decode_rows=(4,) if groups > 1 else (4, 8))
    mesh, target = make_mesh(config.mesh), local_target()
    abstract = abstract_engine(config, layer_loop_for(target, spread=True), target, mesh)
    compiled = abstract.lower(PlanFormat.of(config, decode_shapes(config)[0])).compile()
    text, memory = compiled.as_text() or "", compiled.memory_analysis()
    assert memory is not None
    found = collectives(text)
    return {
        "groups": groups,
        "stages": stages,
        "layer loops": len(re.findall(r'known_trip_count"?:\{"n":"3"', text)),
        "products": len(re.findall(r" dot\(", text)),
        "moves": [[one.num_bytes, times] for one, times in found.items() if "permute" in one.operation],
        "other bytes": [
            one.num_bytes for one in found if "permute" not in one.operation and not one.conditional
        ],
        "temporaries": memory.temp_size_in_bytes,
        "pool": sum(array.size * 4 for array in jax.tree.leaves(abstract.state.cache)) // stages,
        "aliased": memory.alias_size_in_bytes,
    }


if __name__ == "__main__":
    main()
