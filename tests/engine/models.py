"""Small engines and loops over the tiny models, for the tests of the device half."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxserve.config import CacheConfig, EngineConfig
from jaxserve.engine.engine import DeviceEngine
from jaxserve.engine.parameters import Named, place_parameters, quantised
from jaxserve.engine.programs import compile_programs
from jaxserve.loop import HostLoop
from jaxserve.model.transformer import LayerLoop
from jaxserve.outputs import RequestOutput
from jaxserve.plan import SamplingParams
from jaxserve.quantization import recipe_named
from jaxserve.weights import Checkpoint, open_checkpoint
from pallas_kernels.dispatch import Target


def small_engine(
    folder: Path,
    layer_loop: LayerLoop = "switched",
    *,
    native: bool = False,
    overrides: tuple[tuple[str, str], ...] = (),
    draft: Path | None = None,
    **settings: Any,
) -> DeviceEngine:
    """An engine of few, small programs.

    `native`: by the kernels for this CPU, which must be loaded, but for `overrides`. `draft`: a model that
    drafts. `settings` are fields of EngineConfig, or num_pages, kv_format.
    """
    checkpoint = open_checkpoint(folder)
    model = checkpoint.config
    kv_format = settings.pop("kv_format", settings.get("compute_format", "float32"))
    num_pages = settings.pop("num_pages", 64)
    defaults: dict[str, Any] = {
        "max_model_len": min(256, model.max_position),
        "num_slots": 4,
        "decode_rows": (4,),
        "chunk_rows": (64,),
        "compute_format": "float32",
    }
    config = EngineConfig(
        model=model,
        cache=CacheConfig(page_size=16, num_pages=(num_pages,) * len(model.windows), kv_format=kv_format),
        **(defaults | settings),
    )
    drafter = None if draft is None else open_checkpoint(draft)
    if drafter is not None:
        config = config.drafted_by(drafter.config)
    target = Target(native=native, overrides=overrides)
    params = place_parameters(_named_parameters(checkpoint, config), model, layer_loop)
    if drafter is not None and config.draft is not None:
        params["draft"] = place_parameters(
            _named_parameters(drafter, config.draft), drafter.config, layer_loop
        )
    return DeviceEngine(config, params, compile_programs(config, layer_loop, target=target))


def _named_parameters(checkpoint: Checkpoint, config: EngineConfig) -> Named:
    if config.recipe is None:
        return checkpoint.read(config.compute_format)
    recipe = recipe_named(config.recipe)
    return quantised(checkpoint.read("float32"), config.model, recipe, config.compute_format)


def serve(
    loop: HostLoop, requests: Sequence[tuple[Sequence[int], SamplingParams]], together: bool = True
) -> list[RequestOutput]:
    """The finished requests in order, served all at once or one after another."""
    outputs: dict[str, RequestOutput] = {}
    for number, (prompt, params) in enumerate(requests):
        loop.add(str(number), prompt, params)
        if not together:
            outputs.update(_run(loop))
    outputs.update(_run(loop))
    loop.check_integrity()
    assert loop.idle
    return [outputs[str(number)] for number in range(len(requests))]


def _run(loop: HostLoop) -> dict[str, RequestOutput]:
    return {delta.request_id: delta.output for delta in loop.run_until_idle() if delta.output is not None}
