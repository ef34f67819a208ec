"""What does the host cost per step? `python -m benchmarks.host_loop`

The real scheduler and loop over an engine that computes nothing: every microsecond measured is the host's.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from jaxserve.loop import HostLoop
from jaxserve.plan import EngineLimits, SamplingParams, SlotLoad, StepHandle, StepPlan, StepResult, StepShape

PROMPT = list(range(32))


class NullEngine:
    """Answers every logit row with the same token, at once."""

    def __init__(self, num_slots: int) -> None:
        rows = (num_slots, 4 * num_slots)
        self.limits = EngineLimits(
            num_slots=num_slots,
            max_model_len=4096,
            page_size=16,
            num_pages=(num_slots * 300,),
            windows=(0,),
            vocab_size=1000,
            decode_shapes=(StepShape(num_slots, num_slots, num_slots, decode=True),),
            chunk_shapes=tuple(StepShape(size, num_slots, num_slots) for size in rows),
            max_logprobs=20,
        )

    def load_slot(self, load: SlotLoad) -> None:
        pass

    def dispatch(self, plan: StepPlan) -> StepHandle:
        return StepHandle(plan, None)

    def collect(self, handle: StepHandle) -> StepResult:
        rows = int(handle.plan.num_logit_rows.sum())
        nothing = np.zeros((rows, 20), np.int32)
        zeros = np.zeros(rows, np.int32)
        return StepResult(zeros, zeros.astype(np.float32), zeros, nothing, nothing.astype(np.float32))


def step_seconds(num_running: int, num_waiting: int, num_steps: int) -> np.ndarray:
    """Seconds of each step once everybody runs: plan, dispatch, collect, commit."""
    loop = HostLoop(NullEngine(num_running))
    params = SamplingParams(temperature=0, max_tokens=4000, ignore_eos=True)
    for number in range(num_running + num_waiting):
        loop.add(str(number), PROMPT, params)
    while loop.num_running < num_running:
        loop.step()
    for _ in range(8):
        loop.step()
    times = np.empty(num_steps)
    for index in range(num_steps):
        start = time.perf_counter()
        loop.step()
        times[index] = time.perf_counter() - start
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    args = parser.parse_args()
    print(f"{'running':>8}{'waiting':>9}{'median us':>11}{'p99 us':>9}{'us per sequence':>17}")
    for num_running, num_waiting in ((1, 0), (16, 0), (64, 0), (64, 10_000), (256, 0), (256, 10_000)):
        micros = step_seconds(num_running, num_waiting, args.steps) * 1e6
        median, p99 = np.percentile(micros, [50, 99])
        print(f"{num_running:>8}{num_waiting:>9}{median:>11.0f}{p99:>9.0f}{median / num_running:>17.2f}")


if __name__ == "__main__":
    main()
