"""Run by tests in a process with eight CPU devices: answers whose prompts are computed on other devices.

    python -m tests.sharding.prefill dense moe ...

Prints one JSON object: for each model and pair of meshes, and for one device, the answers, the margins of
their tokens, and what was moved.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

import jax
import numpy as np

from jaxserve.engine.engine import DeviceEngine
from jaxserve.engine.options import EngineOptions
from jaxserve.engine.page_link import DevicePageLink
from jaxserve.engine.prefill import check_prefill, for_prompts, prefill_options, with_counterpart
from jaxserve.loop import HostLoop
from jaxserve.plan import SamplingParams
from jaxserve.prefill_side import PrefillSide
from jaxserve.scheduling import CacheIdentity
from sharding import mesh_size, parse_mesh
from tests.engine.models import serve
from tests.policies import UNFORESEEN
from tests.sharding.engines import CASES, SETTINGS, build, margin

PAIRS = {
    # Two KV heads: four devices have them twice each, which is said once on the way.
    "dense": (("tensor=2", "tensor=2"), ("tensor=4", "tensor=2"), (None, "tensor=4")),
    # So few pages that requests must give way to others.
    "windowed": (("tensor=2", "tensor=4"),),
    "moe": (("expert=4", "tensor=2,expert=2"),),
    "int8": (("tensor=4", "tensor=2"),),
    "stages of windows": (("pipe=2", "tensor=2,pipe=2"),),
}
FEW_PAGES = {"windowed": {"page_size": 8, "num_pages": 15}}
CACHE = CacheIdentity(model="tiny", kv_format="any")
Engines = tuple[DeviceEngine, DeviceEngine]


def main() -> None:
    """Answer the cases that the command line names."""
    assert jax.device_count() == 8
    report = {
        name: {"alone": alone(name)} | {" ".join(map(str, pair)): apart(name, *pair) for pair in PAIRS[name]}
        for name in sys.argv[1:]
    }
    print(json.dumps(report))


def alone(name: str) -> dict[str, Any]:
    """On one device."""
    engine, _ = build(CASES[name].model, options_of(name))
    return answers(HostLoop(engine, cache=CACHE, policy=UNFORESEEN))


def apart(name: str, mesh: str | None, prefill_mesh: str) -> dict[str, Any]:
    """On two meshes."""
    decoder, prefill = engines(name, mesh, prefill_mesh)
    link = DevicePageLink(prefill, decoder)
    side = PrefillSide(prefill, link, decoder.limits, cache=CACHE)
    report = answers(HostLoop(decoder, cache=CACHE, policy=UNFORESEEN, prefills=side))
    assert prefill.compiles_after_ready == decoder.compiles_after_ready == 0
    devices = [leaf_devices(engine) for engine in (decoder, prefill)]
    assert not devices[0] & devices[1]
    if prefill.config.model.num_kv_heads == decoder.config.model.num_kv_heads:
        check_moves(prefill, decoder, link)
    return report


def options_of(name: str, mesh: str | None = None, prefill_mesh: str | None = None) -> EngineOptions:
    own = {**SETTINGS, **CASES[name].settings, "host_kv_memory": None, **FEW_PAGES.get(name, {})}
    return EngineOptions(**own, mesh=mesh, prefill_mesh=prefill_mesh)


def engines(name: str, mesh: str | None, prefill_mesh: str) -> Engines:
    """One that decodes, and one on the devices after its own."""
    model, options = CASES[name].model, options_of(name, mesh, prefill_mesh)
    axes = parse_mesh(mesh or "tensor=1")
    check_prefill(options, axes, model, jax.device_count(), "cpu")
    readable = {"moves_pages": True}
    decoder, _ = build(
        model, options, lambda config: dataclasses.replace(with_counterpart(config), **readable)
    )
    own = prefill_options(options, decoder.config)
    first = mesh_size(axes)
    prefill, _ = build(model, own, lambda config: dataclasses.replace(for_prompts(config, first), **readable))
    return decoder, prefill


def leaf_devices(engine: DeviceEngine) -> set[Any]:
    return {device for leaf in jax.tree.leaves(engine.state_shapes) for device in leaf.sharding.device_set}


def check_moves(source: DeviceEngine, target: DeviceEngine, link: DevicePageLink) -> None:
    """Pages arrive as they were sent, and others stay as they are."""
    for group in range(len(source.limits.windows)):
        held = source.read_pages(group, range(1, 12)).take()
        before = target.read_pages(group, range(14)).take()
        assert len(np.unique(held)) > 100
        targets = [13, 2, 3, 4, 12, 6, 7, 8, 9, 10, 11]
        link.move(group, list(range(1, 12)), targets)
        after = target.read_pages(group, range(14)).take()
        np.testing.assert_array_equal(after[targets], held)
        np.testing.assert_array_equal(after[[1, 5]], before[[1, 5]])


def answers(loop: HostLoop) -> dict[str, Any]:
    """To all requests at once, and then to the first again."""
    served = serve(loop, requests()) + serve(loop, requests()[:1])
    loop.check_integrity()
    snapshot = loop.snapshot()
    outputs = [output.outputs[0] for output in served]
    told = [output.logprobs or [] for output in outputs]
    moved = snapshot.prefills
    return {
        "tokens": [list(output.token_ids) for output in outputs],
        "margins": [[margin(step) for step in steps] for steps in told],
        "cached": served[-1].num_cached_tokens,
        "preemptions": snapshot.num_preemptions,
        "prompts": 0 if moved is None else moved.num_prompts,
        "pages": 0 if moved is None else moved.num_pages,
    }


def requests() -> list[tuple[list[int], SamplingParams]]:
    """More than there are slots; all but one have more than a page to compute."""
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=4)
    penalised = dataclasses.replace(greedy, presence_penalty=0.5, repetition_penalty=1.1)
    sampled = dataclasses.replace(greedy, temperature=0.8, top_k=20, top_p=0.9, seed=3, logprobs=None)
    long = [(7 * i) % 250 + 3 for i in range(50)]
    other = [(11 * i) % 250 + 3 for i in range(37)]
    return [
        (long, greedy),
        (other, penalised),
        ([*long[:40], 9], greedy),
        (other[:30], sampled),
        ([44, 8], sampled),
        ([*other, 5, 6], greedy),
    ]


if __name__ == "__main__":
    main()
