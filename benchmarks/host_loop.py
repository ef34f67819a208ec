"""What does the host cost per step, and does the device wait for it? `python -m benchmarks.host_loop`

The real scheduler and loop over an engine that computes nothing: every microsecond measured is the host's. A
second table gives the engine a step time, and tells for how much of the time it had nothing to do.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np

from benchmarks.machine import describe
from jaxserve.loop import HostLoop
from jaxserve.loop_stats import Stage
from jaxserve.plan import EngineLimits, SamplingParams, SlotLoad, StepHandle, StepPlan, StepResult, StepShape
from jaxserve.scheduling import CacheIdentity

PROMPT = list(range(31))
CRITICAL: tuple[Stage, ...] = ("plan", "commit")
"""The stages between which a step's tokens and the next step's plan are made."""


class TimedEngine:
    """Answers every logit row with the same token, each step `step_seconds` after the last one's end."""

    def __init__(self, num_slots: int, step_seconds: float = 0.0) -> None:
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
        self.step_seconds = step_seconds
        """May be changed at any time."""
        self._busy_until = time.perf_counter()
        self.idle_seconds = 0.0

    def load_slot(self, load: SlotLoad) -> None:
        pass

    def load_masks(self, slots: np.ndarray, masks: np.ndarray, ahead: np.ndarray | None = None) -> None:
        pass

    def dispatch(self, plan: StepPlan) -> StepHandle:
        now = time.perf_counter()
        self.idle_seconds += max(0.0, now - self._busy_until)
        self._busy_until = max(now, self._busy_until) + self.step_seconds
        return StepHandle(plan, self._busy_until)

    def collect(self, handle: StepHandle) -> StepResult:
        remaining = handle.device_result - time.perf_counter()
        if remaining > 0:
            time.sleep(remaining)
        rows = int(handle.plan.num_logit_rows.sum())
        nothing = np.zeros((rows, 20), np.int32)
        zeros = np.zeros(rows, np.int32)
        return StepResult(zeros, zeros.astype(np.float32), zeros, nothing, nothing.astype(np.float32))


def running_loop(engine: TimedEngine, num_running: int, num_waiting: int) -> HostLoop:
    """A loop in which so many decode, and so many wait, with prefixes kept as a server does.

    Texts differ, and in length too, so that not all fill a page in the same step.
    """
    loop = HostLoop(engine, cache=CacheIdentity(model="none", kv_format="none"))
    params = SamplingParams(temperature=0, max_tokens=4000, ignore_eos=True)
    for number in range(num_running + num_waiting):
        loop.add(str(number), [number % 1000, *PROMPT[number % 16 :]], params)
    while loop.num_running < num_running:
        loop.step()
    for _ in range(8):
        loop.step()
    return loop


def stage_seconds(loop: HostLoop, num_steps: int) -> dict[str, np.ndarray]:
    """Seconds of each step in plan and commit together, and in all that the host does for it."""
    critical, whole = np.empty(num_steps), np.empty(num_steps)
    for index in range(num_steps):
        before = loop.snapshot().stage_seconds
        loop.step()
        after = loop.snapshot().stage_seconds
        spent = {stage: after[stage] - before[stage] for stage in after}
        critical[index] = sum(spent[stage] for stage in CRITICAL)
        whole[index] = sum(spent.values()) - spent["idle"] - spent["wait"]
    return {"plan and commit": critical, "all stages": whole}


def idle_share(num_running: int, step_seconds: float, num_steps: int) -> float:
    """For how much of the time the engine had nothing to do."""
    engine = TimedEngine(num_running, step_seconds)
    loop = running_loop(engine, num_running, 0)
    before, started = engine.idle_seconds, time.perf_counter()
    for _ in range(num_steps):
        loop.step()
    return (engine.idle_seconds - before) / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000, help="steps measured in each row of the table")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    figures: dict[str, object] = {"machine": describe()}
    print(f"{'running':>8}{'waiting':>9}  {'stages':<17}{'median us':>10}{'p99 us':>9}{'us/sequence':>13}")
    for num_running, num_waiting in ((1, 0), (16, 0), (64, 0), (64, 10_000), (256, 0), (256, 10_000)):
        loop = running_loop(TimedEngine(num_running), num_running, num_waiting)
        for stages, seconds in stage_seconds(loop, args.steps).items():
            median, p99 = np.percentile(seconds * 1e6, [50, 99])
            each = median / num_running
            print(f"{num_running:>8}{num_waiting:>9}  {stages:<17}{median:>10.0f}{p99:>9.0f}{each:>13.2f}")
            figures[f"{stages}, {num_running} running, {num_waiting} waiting"] = [median, p99]
    print(f"\n{'running':>8}{'step ms':>9}{'device idle':>13}")
    for num_running, milliseconds in ((16, 5), (64, 5), (256, 5), (256, 20)):
        share = idle_share(num_running, milliseconds / 1000, args.steps // 4)
        print(f"{num_running:>8}{milliseconds:>9}{share:>13.2%}")
        figures[f"device idle, {num_running} running, {milliseconds} ms"] = share
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
