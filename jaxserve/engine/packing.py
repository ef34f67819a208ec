"""The host's records as the arrays that an engine's programs take, and results as its records' rows."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from jaxserve.config import EngineConfig
from jaxserve.engine.slots import PackedLoad, pack_copies, pack_load, pack_masks
from jaxserve.engine.step import PlanFormat
from jaxserve.plan import IntArray, SlotLoad, StepPlan


class Packing:
    """For an engine of one replica. Each raises ValueError for what does not fit the engine."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config

    def load(self, load: SlotLoad) -> PackedLoad:
        return pack_load(load, self._config)

    def copies(self, load: SlotLoad) -> np.ndarray:
        """Those of a load."""
        return pack_copies(load.copies, self._config.cache.num_pages)

    def masks(
        self, slots: IntArray, masks: npt.NDArray[np.uint32], ahead: IntArray | None
    ) -> tuple[np.ndarray, ...]:
        """The arrays of `pack_masks`; the last tells their number."""
        return pack_masks(slots, masks, ahead, self._config)

    def plan(self, form: PlanFormat, plan: StepPlan) -> np.ndarray:
        return form.pack(plan)

    def rows(self, plan: StepPlan, packed: np.ndarray) -> np.ndarray:
        """A step's result without what is padding: its logit rows, of each iteration in turn."""
        num_logit_rows = int(plan.num_logit_rows.sum())
        if packed.ndim == 2:
            return packed[:num_logit_rows]
        return packed[: plan.num_iterations, :num_logit_rows].reshape(-1, packed.shape[-1])
