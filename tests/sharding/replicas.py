"""Run by a test in a process with eight CPU devices: what a mesh of replicas does that one device does too.

    python -m tests.sharding.replicas MESH...

Prints one JSON object: for each mesh, and for one device, the answers with drafts, with several iterations to
a step, with samples that share prompts and begun pages, and the tokens that masks leave.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

import numpy as np

from jaxserve.engine.engine import DeviceEngine
from jaxserve.engine.options import EngineOptions
from jaxserve.loop import HostLoop
from jaxserve.plan import PageGrant, SamplingParams, SequencePlan, SlotLoad, StepPlan, pack_token_ids
from jaxserve.scheduling import CacheIdentity
from jaxserve.speculation import Speculation
from tests.drafters import foreseeing
from tests.engine.models import serve
from tests.policies import UNFORESEEN
from tests.sharding.engines import CASES, SETTINGS, build

PROMPT = [(7 * i) % 250 + 3 for i in range(21)]
ONLY = (17, 200)
"""The tokens that masks leave, of two slots."""


def main() -> None:
    """Answer on one device and on the meshes that the command line names."""
    print(json.dumps({mesh or "alone": answers(mesh) for mesh in (None, *sys.argv[1:])}))


def answers(mesh: str | None) -> dict[str, Any]:
    own = {"max_iterations": 4, "speculative": "ngram", "num_pages": 24, "page_size": 8}
    # Whose experts each replica needs of the other, however long its own sequences go on.
    engine, _ = build(CASES["moe"].model, EngineOptions(**{**SETTINGS, **own}, mesh=mesh))
    masked = masked_tokens(engine)
    plain = served(engine, None)
    texts = [[*prompt, *tokens] for (prompt, _), tokens in zip(requests(), plain["first"], strict=True)]
    drafted = served(engine, Speculation(drafter=foreseeing(texts, 256), max_drafts=4, adaptive=False))
    assert engine.compiles_after_ready == 0
    return {"masked": masked, "plain": plain, "drafted": drafted}


def requests() -> list[tuple[list[int], SamplingParams]]:
    greedy = SamplingParams(temperature=0, max_tokens=17, ignore_eos=True)
    sampled = SamplingParams(n=3, temperature=0.9, seed=5, max_tokens=9, ignore_eos=True)
    penalised = dataclasses.replace(greedy, repetition_penalty=1.3, frequency_penalty=0.4)
    return [(PROMPT, greedy), ([5, 9, 30], penalised), (PROMPT[:14], sampled), ([77], greedy)]


def served(engine: DeviceEngine, speculation: Speculation | None) -> dict[str, Any]:
    loop = HostLoop(
        engine,
        cache=CacheIdentity(model="tiny", kv_format="any"),
        policy=UNFORESEEN,
        speculation=speculation,
    )
    outputs = serve(loop, requests())
    loop.check_integrity()
    snapshot = loop.snapshot()
    found = {
        "tokens": [[list(one.token_ids) for one in output.outputs] for output in outputs],
        "first": [list(output.outputs[0].token_ids) for output in outputs],
        "accepted": 0 if snapshot.speculation is None else snapshot.speculation.num_accepted,
    }
    return found


def masked_tokens(engine: DeviceEngine) -> list[int]:
    """What the first and the last slot sample where masks leave one token each, side by side in a step."""
    limits = engine.limits
    slots = [0, limits.num_slots - 1]
    params = SamplingParams(temperature=0)
    for slot in slots:
        engine.load_slot(
            SlotLoad(slot, PROMPT[:5], 5, 0, ((),) * len(limits.windows), params, seed=0, sample_index=0)
        )
    masks = np.stack([pack_token_ids([token], limits.vocab_size) for token in ONLY])
    engine.load_masks(np.array(slots, np.int32), masks)
    # Where the slots are of two replicas, the page is another one in each.
    pages = (1, 1 if limits.num_replicas > 1 else 2)
    plan = StepPlan.of(
        [SequencePlan(slot, 5) for slot in slots],
        [PageGrant(0, slot, 0, page) for slot, page in zip(slots, pages, strict=True)],
        limits.chunk_shapes[-1],
    )
    return engine.collect(engine.dispatch(plan)).tokens.tolist()


if __name__ == "__main__":
    main()
