"""The device half: owns the parameters, the state and the compiled steps."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxserve.config import EngineConfig
from jaxserve.engine.compile_cache import compile_counter
from jaxserve.engine.ladder import chunk_shapes, decode_shapes
from jaxserve.engine.state import DeviceState, load_slot, make_state, pack_load
from jaxserve.engine.step import PlanFormat, run_step, unpack_result
from jaxserve.model.cache import page_layouts
from jaxserve.model.transformer import LayerLoop, Params, Transformer
from jaxserve.plan import EngineLimits, SamplingParams, SlotLoad, StepHandle, StepPlan, StepResult, StepShape

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CompiledStep:
    """One rung of the ladder."""

    form: PlanFormat
    run: Callable[[Params, DeviceState, np.ndarray], tuple[DeviceState, jax.Array]]


class DeviceEngine:
    """A `StepEngine` on the default JAX device.

    Everything is compiled when it is constructed, or read from the persistent compilation cache; nothing
    is compiled afterwards.
    """

    def __init__(
        self,
        config: EngineConfig,
        params: Params,
        layer_loop: LayerLoop,
        *,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Compile and warm up.

        Args:
            config: what to compile for.
            params: the model's parameters on the device; kept, never donated.
            layer_loop: how the parameters were placed.
            on_progress: called with the programs compiled so far and their total.
        """
        self._config = config
        self._params = params
        layouts = page_layouts(config, jax.default_backend())
        self._transformer = Transformer(config, layouts, layer_loop)
        self._state = make_state(config, layouts)
        shapes = decode_shapes(config) + chunk_shapes(config)
        total = len(shapes) + 1
        started = time.monotonic()
        compile_counter()
        self._load_slot = self._compile(load_slot, self._state, self._example_load())
        on_progress(1, total)
        self._steps: dict[StepShape, CompiledStep] = {}
        for number, shape in enumerate(shapes):
            self._steps[shape] = self._compile_step(shape)
            on_progress(number + 2, total)
        self._compiles_when_ready = compile_counter().count
        logger.info("compiled or loaded %d programs in %.1f s", total, time.monotonic() - started)

    @property
    def config(self) -> EngineConfig:
        return self._config

    @property
    def compiles_after_ready(self) -> int:
        """Programs that this process compiled since this engine was ready; each one is a fault."""
        return compile_counter().count - self._compiles_when_ready

    @property
    def limits(self) -> EngineLimits:
        config = self._config
        return EngineLimits(
            num_slots=config.num_slots,
            max_model_len=config.max_model_len,
            page_size=config.cache.page_size,
            num_pages=config.cache.num_pages,
            windows=config.model.windows,
            vocab_size=config.model.vocab_size,
            decode_shapes=decode_shapes(config),
            chunk_shapes=chunk_shapes(config),
            max_logprobs=config.max_logprobs,
            eos_token_ids=config.model.eos_token_ids,
        )

    def load_slot(self, load: SlotLoad) -> None:
        """Fill a slot. Raises ValueError if the load does not fit the engine."""
        self._state = self._load_slot(self._state, pack_load(load, self._config))

    def dispatch(self, plan: StepPlan) -> StepHandle:
        """Start a step and return at once; steps run in the order of dispatch."""
        step = self._steps[plan.shape]
        self._state, result = step.run(self._params, self._state, step.form.pack(plan))
        return StepHandle(plan, result)

    def collect(self, handle: StepHandle) -> StepResult:
        """Wait for a step and bring its result to the host."""
        num_logit_rows = sum(sequence.num_logit_rows for sequence in handle.plan.sequences)
        return unpack_result(np.asarray(handle.device_result), num_logit_rows)

    def _compile_step(self, shape: StepShape) -> CompiledStep:
        config = self._config
        form = PlanFormat(shape, len(config.model.windows), config.num_slots, config.cache.page_size)
        vector = form.pack(StepPlan((), (), shape))
        step = functools.partial(run_step, self._transformer, form)
        compiled = jax.jit(step, donate_argnums=1).lower(self._params, self._state, vector).compile()
        self._state, result = compiled(self._params, self._state, vector)
        result.block_until_ready()
        return CompiledStep(form, compiled)

    def _compile(self, function: Callable[..., DeviceState], state: DeviceState, *args: Any) -> Any:
        return jax.jit(function, donate_argnums=0).lower(state, *args).compile()

    def _example_load(self) -> Any:
        groups = len(self._config.model.windows)
        load = SlotLoad(
            slot=self._config.num_slots,
            tokens=(),
            num_prompt_tokens=0,
            num_computed=0,
            pages=((),) * groups,
            params=SamplingParams(),
            seed=0,
            sample_index=0,
        )
        return pack_load(load, self._config)
