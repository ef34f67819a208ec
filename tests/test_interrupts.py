"""Ctrl-C while a model is made ready: never lost, wherever Python happens to be."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxserve.interrupts import interrupts_kept
from tests.conftest import REPOSITORY


def press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000):  # The signal is handled between two instructions.
        time.sleep(0)


def swallow() -> None:
    try:
        press_ctrl_c()
    except KeyboardInterrupt:
        return
    pytest.fail("no interrupt")


def test_an_interrupt_that_somebody_swallows_comes_at_the_end() -> None:
    swallowed: list[bool] = []

    def load() -> None:
        with interrupts_kept():
            swallow()
            swallowed.append(True)

    with pytest.raises(KeyboardInterrupt):
        load()
    assert swallowed == [True]


def test_an_interrupt_in_the_garbage_collector_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda info: forgotten.append(info.exc_type))

    def callback(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and not forgotten:
            press_ctrl_c()

    gc.callbacks.append(callback)
    try:
        with pytest.raises(KeyboardInterrupt), interrupts_kept():
            gc.collect()
    finally:
        gc.callbacks.remove(callback)
    assert forgotten == [KeyboardInterrupt]


def test_a_block_within_another_knows_of_what_came_before() -> None:
    def load() -> None:
        with interrupts_kept():
            swallow()
            with interrupts_kept() as check:
                check()
            pytest.fail("no interrupt")

    with pytest.raises(KeyboardInterrupt):
        load()


def test_an_interrupt_that_became_another_error_is_one_again() -> None:
    def fail() -> None:
        try:
            press_ctrl_c()
        except KeyboardInterrupt as error:
            raise RuntimeError("INTERNAL") from error

    with pytest.raises(KeyboardInterrupt) as caught, interrupts_kept():
        fail()
    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(RuntimeError, match="of its own"), interrupts_kept():
        raise RuntimeError("of its own")


def test_other_threads_can_ask() -> None:
    seen: list[bool] = []

    def ask(check: Callable[[], None]) -> None:
        try:
            check()
        except KeyboardInterrupt:
            seen.append(True)
        else:
            seen.append(False)

    def load() -> None:
        with interrupts_kept() as check:
            for _ in range(2):
                thread = threading.Thread(target=ask, args=[check])
                thread.start()
                thread.join()
                if len(seen) == 1:
                    swallow()

    with pytest.raises(KeyboardInterrupt):
        load()
    assert seen == [False, True]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.slow
def test_ctrl_c_at_any_moment_of_a_start_ends_it(shared_data: Path) -> None:
    folder = shared_data / "models" / "stories260K" / "hf"
    moments = random.Random(4)
    # Endless, so that only the interrupt can end it.
    command = ["generate", str(folder), "--raw", "-p", "Once", "-v", "--ignore-eos", "--max-tokens", "99999"]
    for _ in range(4):
        process = subprocess.Popen(
            [sys.executable, "-m", "jaxserve", *command],
            cwd=REPOSITORY,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        with process:
            assert process.stderr is not None
            assert process.stderr.readline().startswith("loading ")
            time.sleep(moments.uniform(0.0, 3.0))
            process.send_signal(signal.SIGINT)
            pressed = time.monotonic()
            err = process.stderr.read()
            # Python kills itself by SIGINT if one broke off an `exec`, as of a dataclass: 130 to a shell too.
            assert process.wait(60) in (130, -signal.SIGINT), err
            assert time.monotonic() - pressed < 30
            assert "Traceback" not in err
