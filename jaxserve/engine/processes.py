"""An engine whose mesh spans the processes of a job: one leads, the others run what it runs.

Whatever the host gives to a program is the leader's part of an array that has one for every device, see
`jaxserve.engine.words`. So followers are told nothing but a program's number.
"""

from __future__ import annotations

import dataclasses
import hashlib
import queue
import signal
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh

from jaxserve.config import EngineConfig
from jaxserve.device_loss import DeviceLostError
from jaxserve.engine.engine import DeviceEngine
from jaxserve.engine.programs import Programs, SlotPrograms, StepProgram, make_spread_state
from jaxserve.engine.words import as_words, parts
from jaxserve.model.transformer import Params
from jaxserve.plan import StepHandle, StepPlan, StepResult
from jaxserve.version import __version__
from sharding import make_mesh
from sharding.processes import FollowingJob, LeadingJob, current_job

Program = Callable[..., Any]


def join_engine(config: EngineConfig, params: Params, programs: Programs, fingerprint: str) -> DeviceEngine:
    """An engine of the processes of this job, once all are ready; a plain one where there is no job.

    Args:
        config: what the programs were compiled for.
        params: the model's parameters on the devices.
        programs: from `compile_programs`.
        fingerprint: of the model.

    Does not return in a process that follows: raises SystemExit when the leader has ended. Raises ValueError
    where processes differ in what they must have in common.
    """
    job = current_job()
    if job is None:
        return DeviceEngine(config, params, programs)
    mesh = make_mesh(config.mesh)
    assert mesh is not None, "it spans the devices of all processes"
    facts = {
        "jaxserve": __version__,
        "jax": jax.__version__,
        "the model": fingerprint,
        "the engine": hashlib.sha256(repr(config).encode()).hexdigest()[:12],
        "the kernels": str(sorted(programs.kernels.items())),
    }
    if isinstance(job, LeadingJob):
        job.wait_ready(facts)
        return LeadingEngine(config, params, _announced(programs, mesh, job), job)
    assert isinstance(job, FollowingJob), "it leads or follows"
    state = make_spread_state(config)
    job.ready(facts)
    _follow(job, params, state, programs, mesh)
    raise SystemExit(0)


class LeadingEngine(DeviceEngine):
    """The engine as process 0 has it."""

    def __init__(self, config: EngineConfig, params: Params, programs: Programs, job: LeadingJob) -> None:
        super().__init__(config, params, programs)
        self._job = job
        self._results: deque[jax.Array] = deque()
        """Of steps that were started and not compared with the followers' yet."""

    def dispatch(self, plan: StepPlan) -> StepHandle:
        """As any engine's. Raises DeviceLostError if a process is lost."""
        try:
            return super().dispatch(plan)
        except jax.errors.JaxRuntimeError as error:
            raise self._reason(error) from error

    def collect(self, handle: StepHandle) -> StepResult:
        """As any engine's. Raises DeviceLostError if a process is lost."""
        try:
            result = super().collect(handle)
        except jax.errors.JaxRuntimeError as error:
            raise self._reason(error) from error
        while True:
            # Followers tell of each step, also of a tick that nobody waits for.
            own = self._results.popleft()
            self._job.compare(_checksum(own))
            if own is handle.device_result:
                return result

    def _run(self, program: StepProgram, plan: StepPlan, *counts: np.int32) -> jax.Array:
        result = super()._run(program, plan, *counts)
        self._results.append(result)
        return result

    def _reason(self, error: Exception) -> Exception:
        """Why a call failed: often another process's end, of which the link tells a little later."""
        verdict = self._job.verdict(error)
        return verdict if verdict is error else DeviceLostError(str(verdict))


Leaves = Literal["state", "state and result", "pages"]
"""What a program leaves behind; of pages that are read only the leader has a use."""


@dataclasses.dataclass(frozen=True)
class _Numbered:
    """A program that all processes run."""

    run: Any
    """Compiled. Of parameters, if it is a step, the state, and what the leader says."""
    leaves: Leaves = "state"

    @property
    def num_own(self) -> int:
        """Of its arguments, how many lie on the devices."""
        return 2 if self.leaves == "state and result" else 1

    def blank(self, mesh: Mesh) -> jax.Array:
        """What a process says that has nothing to say."""
        (info,) = self.run.args_info[0][self.num_own :]
        return parts(np.zeros(info.shape[1:], info.dtype), mesh)


def _numbered(programs: Programs) -> Iterator[_Numbered]:
    """Every program, in an order that all processes have in common."""
    slots = programs.slots
    yield _Numbered(slots.load_slot)
    yield _Numbered(slots.copy_pages)
    for width in sorted(slots.load_masks):
        yield _Numbered(slots.load_masks[width])
    for step in (*programs.steps.values(), *programs.iterated.values()):
        yield _Numbered(step.run, "state and result")
    for group in programs.pages:
        yield _Numbered(group.read, "pages")
        yield _Numbered(group.write)


def _announced(programs: Programs, mesh: Mesh, job: LeadingJob) -> Programs:
    """The programs for the leader to call: each has the followers run it too."""

    def announced(number: int, program: _Numbered) -> Program:
        def call(*arguments: Any) -> Any:
            own, given = arguments[: program.num_own], arguments[program.num_own :]
            said = parts(as_words(given), mesh)
            job.run(number)
            return program.run(*own, said)

        return call

    calls = iter([announced(number, program) for number, program in enumerate(_numbered(programs))])
    slots = SlotPrograms(
        load_slot=next(calls),
        copy_pages=next(calls),
        load_masks={width: next(calls) for width in sorted(programs.slots.load_masks)},
    )
    steps, iterated = (
        {shape: dataclasses.replace(step, run=next(calls)) for shape, step in group.items()}
        for group in (programs.steps, programs.iterated)
    )
    pages = tuple(dataclasses.replace(group, read=next(calls), write=next(calls)) for group in programs.pages)
    return dataclasses.replace(programs, slots=slots, steps=steps, iterated=iterated, pages=pages)


def _follow(job: FollowingJob, params: Params, state: Any, programs: Programs, mesh: Mesh) -> None:
    """Run what the leader runs, until it ends."""
    table = [(program, program.blank(mesh)) for program in _numbered(programs)]
    results: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_report, args=(job, results), name="jaxserve-results", daemon=True).start()
    if threading.current_thread() is threading.main_thread():
        # Who stops all processes at once wants the leader to let requests end: it takes the others along.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
    while (number := job.next_program()) is not None:
        program, blank = table[number]
        try:
            if program.leaves == "state and result":
                state, result = program.run(params, state, blank)
                results.put(result)
            elif program.leaves == "state":
                state = program.run(state, blank)
            else:
                program.run(state, blank)
        except jax.errors.JaxRuntimeError as error:
            job.fail(error)


def _report(job: FollowingJob, results: queue.SimpleQueue[Any]) -> None:
    """Tell the leader of every result, as it is there."""
    while True:
        try:
            job.report(_checksum(results.get()))
        except jax.errors.JaxRuntimeError as error:
            job.fail(error)


def _checksum(result: jax.Array) -> int:
    return zlib.crc32(np.asarray(result).tobytes())
