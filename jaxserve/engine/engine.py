"""The device half: owns the parameters, the state and the compiled programs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
import numpy.typing as npt

from jaxserve.config import EngineConfig
from jaxserve.engine.chain_drafts import DRAFT_PARAMETERS
from jaxserve.engine.compile_cache import compile_counter
from jaxserve.engine.ladder import chunk_shapes, decode_shapes
from jaxserve.engine.page_moves import PAGES_PER_MOVE, Bytes, DevicePageRead, page_calls
from jaxserve.engine.programs import Programs, StepProgram, make_spread_state
from jaxserve.engine.replicas import packing_for
from jaxserve.engine.slots import pack_reads
from jaxserve.engine.state import DeviceState
from jaxserve.engine.step import unpack_result
from jaxserve.model.transformer import Params
from jaxserve.plan import EngineLimits, IntArray, SlotLoad, StepHandle, StepPlan, StepResult

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class DeviceEngine:
    """A `StepEngine` on the devices of its mesh. Nothing is compiled once it exists."""

    def __init__(self, config: EngineConfig, params: Params, programs: Programs) -> None:
        """Join a model's parameters to the programs compiled for its config.

        Args:
            config: what the programs were compiled for.
            params: the model's parameters on the devices; kept, never donated.
            programs: from `compile_programs`.
        """
        self._config = config
        self._params = params
        self._programs = programs
        self._packing = packing_for(config)
        self._state = make_spread_state(config)
        self.prefill: DeviceEngine | None = None
        """Computes prompts for this one, on devices of its own."""
        self.mark_ready()

    @property
    def config(self) -> EngineConfig:
        return self._config

    @property
    def kernels(self) -> Mapping[str, str]:
        """By operation the implementations that its steps were compiled with."""
        return self._programs.kernels

    @property
    def weight_bytes(self) -> int:
        """Of all parameters, scales included."""
        return sum(array.nbytes for array in jax.tree.leaves(self._params))

    @property
    def compiles_after_ready(self) -> int:
        """Programs that this process compiled since this engine was ready; each one is a fault."""
        return compile_counter().count - self._compiles_when_ready

    @property
    def limits(self) -> EngineLimits:
        config = self._config
        return EngineLimits(
            num_slots=config.num_slots * config.num_replicas,
            max_model_len=config.max_model_len,
            page_size=config.cache.page_size,
            num_pages=config.cache.num_pages,
            windows=config.model.windows,
            vocab_size=config.model.vocab_size,
            decode_shapes=decode_shapes(config),
            chunk_shapes=chunk_shapes(config),
            max_logprobs=config.max_logprobs,
            eos_token_ids=config.model.eos_token_ids,
            copies_pages=True,
            max_iterations=config.max_iterations if decode_shapes(config) else 1,
            max_drafts=config.max_drafts,
            drafts_itself=config.draft_layers > 0 or config.draft is not None,
            draft_reads=max(self._programs.reads, default=0),
            num_replicas=config.num_replicas,
        )

    def load_slot(self, load: SlotLoad) -> None:
        """Fill a slot. Raises ValueError if the load does not fit the engine."""
        programs, packed = self._programs.slots, self._packing.load(load)
        if load.copies:
            self._state = programs.copy_pages(self._state, self._packing.copies(load))
        self._state = programs.load_slot(self._state, packed)

    def load_masks(
        self, slots: IntArray, masks: npt.NDArray[np.uint32], ahead: IntArray | None = None
    ) -> None:
        """Let slots sample these tokens only. Raises ValueError if the masks do not fit the engine."""
        packed = self._packing.masks(slots, masks, ahead)
        self._state = self._programs.slots.load_masks[len(packed[-1])](self._state, *packed)

    def dispatch(self, plan: StepPlan) -> StepHandle:
        """Start a step and return at once; steps run in the order of dispatch."""
        self._report_compiles()
        if plan.reads is not None:
            self._read(plan.reads)
        if plan.num_iterations == 1:
            program, counts = self._programs.steps[plan.shape], ()
        else:
            program, counts = self._iterated(plan), (np.int32(plan.num_iterations),)
        packed = self._packing.plan(program.form, plan)
        self._state, result = program.run(self._params, self._state, packed, *counts)
        return StepHandle(plan, result)

    def is_ready(self, handle: StepHandle) -> bool:
        """Whether `collect` would not have to wait."""
        return handle.device_result.is_ready()

    def collect(self, handle: StepHandle) -> StepResult:
        """Wait for a step and bring its result to the host."""
        return unpack_result(self._packing.rows(handle.plan, np.asarray(handle.device_result)))

    @property
    def state_shapes(self) -> DeviceState:
        """Shapes of the state's arrays, and where they lie."""
        return jax.tree.map(
            lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding), self._state
        )

    def read_state(self, program: Callable[..., Result], *given: Any) -> Result:
        """What a program reads in the state as every step dispatched so far leaves it."""
        return program(self._state, *given)

    def update_state(self, program: Callable[..., DeviceState], *given: Any) -> None:
        """Have a program change the state, which it is given, before any step dispatched from now on."""
        self._state = program(self._state, *given)

    def mark_ready(self) -> None:
        """What has been compiled until now was compiled in time."""
        self._compiles_when_ready = compile_counter().count
        self._compiles_reported = 0

    @property
    def page_bytes(self) -> tuple[int, ...]:
        """Of a page of each cache group as `read_pages` gives it; empty unless it `moves_pages`."""
        return tuple(program.page_bytes for program in self._programs.pages)

    def read_pages(self, group: int, pages: Sequence[int]) -> DevicePageRead:
        """Start to copy pages to the host, as every step dispatched so far leaves them.

        Only for an engine whose config says `moves_pages`. Raises ValueError for a page that does not exist.
        """
        read = self._programs.pages[group].read
        calls = page_calls(pages, self._config.cache.num_pages[group])
        return DevicePageRead([read(self._state, call) for call in calls], len(pages))

    def write_pages(self, group: int, pages: Sequence[int], data: Bytes) -> None:
        """Start to fill pages with `data` [pages, page_bytes], before any step dispatched from now on.

        Only for an engine whose config says `moves_pages`. Raises ValueError for a page that does not exist,
        or data of another shape.
        """
        program = self._programs.pages[group]
        if data.shape != (len(pages), program.page_bytes):
            raise ValueError(f"data {data.shape} for {len(pages)} pages of {program.page_bytes} bytes")
        for number, call in enumerate(page_calls(pages, self._config.cache.num_pages[group])):
            first = number * PAGES_PER_MOVE
            contents = program.unpack(data[first : first + PAGES_PER_MOVE])
            self._state = program.write(self._state, contents, call)

    def _read(self, reads: IntArray) -> None:
        """Have the draft model read computed tokens. Raises ValueError for more than it can at once."""
        num_tokens, programs = int(reads[:, 2].sum()), self._programs.reads
        width = next((width for width in sorted(programs) if width >= num_tokens), None)
        if width is None:
            raise ValueError(f"{num_tokens} tokens to read; the limits say {max(programs, default=0)}")
        packed = pack_reads(reads, self._config)
        self._state = programs[width](self._params[DRAFT_PARAMETERS], self._state, packed)

    def _iterated(self, plan: StepPlan) -> StepProgram:
        """The program for a plan of several iterations. Raises ValueError if there is none."""
        most = self._config.max_iterations
        if not 1 <= plan.num_iterations <= most or plan.shape not in self._programs.iterated:
            raise ValueError(
                f"{plan.num_iterations} iterations of {plan.shape}; at most {most}, of a decode shape"
            )
        return self._programs.iterated[plan.shape]

    def _report_compiles(self) -> None:
        """Log it as a fault if this process has compiled since the last step: somebody waited for that."""
        late = self.compiles_after_ready
        if late > self._compiles_reported:
            logger.warning("%d programs compiled while serving", late - self._compiles_reported)
            self._compiles_reported = late
