"""A batch in a process of its own: `fake_batch IN OUT [NUM_STEPS]`; slow after so many steps."""

from __future__ import annotations

import sys
import time
from typing import Any

import jaxserve.cli
import jaxserve.opened_model
from jaxserve.plan import StepHandle, StepResult
from server.batch.command import BATCH
from tests.fake_engine import FakeEngine
from tests.fake_model import FakeModel


class TiringEngine(FakeEngine):
    """Cannot come to the end of a batch before a test has met it in the middle."""

    num_steps = 2**62
    """After which each takes half a second."""

    def collect(self, handle: StepHandle) -> StepResult:
        if len(self.plans) > self.num_steps:
            time.sleep(0.5)
        return super().collect(handle)


def main(batch: str, answers: str, num_steps: str = "") -> int:
    """`jaxserve batch fake` on these files, as the command line runs it, installed or not."""
    if num_steps:
        TiringEngine.num_steps = int(num_steps)

    def open_model(name: str, *, progress: bool) -> Any:
        return FakeModel(TiringEngine)

    jaxserve.opened_model.open_model = open_model
    jaxserve.cli.BUILT_IN = (BATCH,)
    return jaxserve.cli.main(["batch", "fake", batch, answers, "--num-slots", "4"])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
