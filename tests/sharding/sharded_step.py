"""Run by a test in a process with eight CPU devices: greedy tokens of one model on one device and on all."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterator

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.config import CacheConfig, EngineConfig, LayerKind, ModelConfig
from jaxserve.engine.parameters import place_parameters, quantised
from jaxserve.engine.shardings import parameter_shardings, state_shardings
from jaxserve.engine.slots import load_slot, pack_load
from jaxserve.engine.state import make_state
from jaxserve.engine.step import PlanFormat, run_step, unpack_result
from jaxserve.model.cache import page_layouts
from jaxserve.model.parameters import model_parameters
from jaxserve.model.transformer import Transformer
from jaxserve.plan import PageGrant, SamplingParams, SequencePlan, SlotLoad, StepPlan, StepShape
from jaxserve.quantization import Recipe, recipe_named

WINDOWED, FULL, EXPERTS = LayerKind(window=12), LayerKind(), LayerKind(experts=True)
MODEL = ModelConfig(
    family="tiny",
    vocab_size=256,
    hidden_size=48,
    intermediate_size=64,
    num_heads=16,
    num_kv_heads=8,
    head_size=16,
    layers=(WINDOWED, FULL) * 2 + (EXPERTS,) * 2,
    max_position=256,
    qk_norm=True,
    qkv_bias=True,
    num_experts=16,
    experts_per_token=3,
    expert_intermediate_size=24,
    tie_embeddings=False,
)
PAGE, NUM_NEW, PENALTY = 16, 24, 0.5
PROMPTS = ([5, 90, 17, 203, 44, 8, 61], list(range(40, 70)))
CHUNK = StepShape(64, 2, 2)
DECODE = StepShape(2, 2, 2, decode=True)


def main() -> None:
    """Print what is answered without a mesh and with one; a recipe may be named on the command line."""
    assert jax.device_count() == 8
    recipe = recipe_named(sys.argv[1]) if len(sys.argv) > 1 else None
    mesh = Mesh(np.array(jax.devices()), ("tensor",))
    print(json.dumps({"alone": generate(None, recipe), "spread": generate(mesh, recipe)}))


def generate(mesh: Mesh | None, recipe: Recipe | None) -> dict[str, list[list[float]]]:
    """The greedy answers to both prompts, by one chunk and then decode steps: `tokens`, their `logprobs`, and
    by how much each led the next one, penalties included, its `margins`."""
    config = EngineConfig(
        model=MODEL,
        cache=CacheConfig(page_size=PAGE, num_pages=(32, 32), kv_format="int8"),
        max_model_len=128,
        num_slots=2,
        decode_rows=(2,),
        chunk_rows=(CHUNK.rows,),
    )
    layouts = page_layouts(config, "cpu")
    transformer = Transformer(config, layouts, "stacked", mesh)
    named = random_parameters()
    params = place_parameters(
        quantised(named, MODEL, recipe, "float32") if recipe else named, MODEL, "stacked"
    )
    state = make_state(config, layouts)
    if mesh is not None:
        params = jax.device_put(params, parameter_shardings(params, MODEL, mesh))
        state = jax.device_put(state, state_shardings(state, mesh))
    places = jax.tree.map(lambda x: x.sharding, state)
    pages_each = 128 // PAGE
    pages = [tuple(range(1 + slot * pages_each, 1 + (slot + 1) * pages_each)) for slot in range(2)]
    load = jax.jit(load_slot, donate_argnums=0, out_shardings=places)
    for slot, prompt in enumerate(PROMPTS):
        state = load(state, pack_load(slot_load(slot, prompt, pages[slot]), config))
    whole = places.num_known if mesh is None else NamedSharding(mesh, PartitionSpec())
    answers: dict[str, list[list[float]]] = {
        part: [[] for _ in PROMPTS] for part in ("tokens", "logprobs", "margins")
    }
    run = functools.cache(
        lambda form: jax.jit(
            functools.partial(run_step, transformer, form), donate_argnums=1, out_shardings=(places, whole)
        )
    )
    for step in range(NUM_NEW):
        counts = [len(prompt) if step == 0 else 1 for prompt in PROMPTS]
        plan = StepPlan.of(
            tuple(SequencePlan(slot, count) for slot, count in enumerate(counts)),
            (PageGrant(0, 0, 0, pages[0][0]),),
            CHUNK if step == 0 else DECODE,
        )
        form = PlanFormat(plan.shape, len(layouts), config.num_slots, PAGE)
        state, packed = run(form)(params, state, form.pack(plan))
        result = unpack_result(np.asarray(packed), len(PROMPTS))
        for number, answer in enumerate(answers["tokens"]):
            penalties = np.isin(result.top_tokens[number], answer) * PENALTY
            first, second = np.sort(result.top_logprobs[number] - penalties)[:-3:-1]
            answers["margins"][number].append(float(first - second))
            answers["logprobs"][number].append(float(result.logprobs[number]))
            answer.append(int(result.tokens[number]))
    return answers


def slot_load(slot: int, prompt: list[int], pages: tuple[int, ...]) -> SlotLoad:
    """A greedy request whose pages are all granted at once."""
    return SlotLoad(
        slot=slot,
        tokens=prompt,
        num_prompt_tokens=len(prompt),
        num_computed=0,
        pages=(pages, pages),
        params=SamplingParams(temperature=0, max_tokens=NUM_NEW, presence_penalty=PENALTY, logprobs=20),
        seed=0,
        sample_index=0,
    )


def random_parameters() -> Iterator[tuple[str, np.ndarray]]:
    """Weights large enough that the answers differ from token to token."""
    rng = np.random.default_rng(0)
    for name, info in model_parameters(MODEL):
        yield name, rng.normal(1.0 if "norm" in name else 0.0, 0.3, info.shape).astype(np.float32)


if __name__ == "__main__":
    main()
