"""Grammars tried out where they can do no harm: in processes that the system ends when they run too long.

Why processes: `llguidance`'s own limits do not hold everywhere. Measured with version 1.9: a JSON schema of a
string with twenty `allOf` patterns (1 KB) takes time exponential in their number and was stopped after
minutes, an object of 10,000 properties takes 10 s, `multipleOf: 1000003` 5 s and 280 MB. All of it runs in
native code, without the interpreter's lock but in a thread that nothing can stop. What passes is compiled
once more in the process that uses it, which is then known to take as little.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading

from jaxserve.plan import Grammar
from jaxserve.structured.checker_process import MAX_BYTES, MAX_SECONDS
from jaxserve.structured.vocabulary import GrammarVocabulary

MAX_WALL_SECONDS = 60.0
"""Beyond this a process that still has processor time left is taken to be stuck."""
_FROM_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
"""What operators, supervisors and a system without memory end processes with; grammars end them otherwise."""


class CheckLostError(RuntimeError):
    """Nobody knows whether a grammar can be followed, since what was to try it out is gone: not its fault."""


class GrammarChecker:
    """A few processes, started when first needed. Safe to use from several threads."""

    def __init__(self, vocabulary: GrammarVocabulary, num_processes: int) -> None:
        self._vocabulary = vocabulary
        self._idle: queue.LifoQueue[_CheckerProcess | None] = queue.LifoQueue()
        for _ in range(num_processes):
            self._idle.put(None)
        self._num_processes = num_processes

    def check(self, grammar: Grammar) -> str:
        """The Lark source of a grammar that can be compiled in bounds.

        Waits for a process to be free; each grammar holds one for about a second at most. Raises ValueError,
        saying what is wrong or which limit was passed; CheckLostError if the process was ended from outside
        or could not be started, and the next one likewise.
        """
        try:
            return self._try(grammar)
        except CheckLostError:  # What has ended one process is over, as a rule, when the next is there.
            return self._try(grammar)

    def _try(self, grammar: Grammar) -> str:
        process = self._idle.get()
        try:
            if process is not None and not process.alive:
                # It was ended from outside while it had nothing to do, which loses no check.
                process.close()
                process = None
            if process is None:
                process = _CheckerProcess(self._vocabulary)
            return process.ask(grammar)
        finally:
            self._idle.put(process if process is not None and process.alive else None)

    def close(self) -> None:
        """End the processes, once each is free."""
        for _ in range(self._num_processes):
            process = self._idle.get()
            if process is not None:
                process.close()
        for _ in range(self._num_processes):
            self._idle.put(None)


class _CheckerProcess:
    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        """Start it. Raises CheckLostError where that fails."""
        try:
            # Neither fork, unsafe beside jax's threads, nor multiprocessing's spawn, which runs a user's
            # script again.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "jaxserve.structured.checker_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # a terminal's interrupt is for the server to handle
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
        except OSError as error:
            raise CheckLostError(f"no process to check it in: {error}") from error
        self._stuck = False
        """Whether it was ended here, for taking too long."""
        if self._ask(json.dumps([token.decode("latin-1") for token in vocabulary.tokens])) is None:
            self.close()
            raise CheckLostError(f"no process to check it in: exit {self._process.returncode}")

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, grammar: Grammar) -> str:
        """The Lark source of a grammar.

        Raises ValueError where the process finds a fault in it or was ended by it; CheckLostError where the
        process was ended from outside.
        """
        answer = self._ask(json.dumps([grammar.kind, grammar.text]))
        if answer is None:
            self.close()
            raise self._last_words()
        lark, fault = json.loads(answer)
        if lark is None:
            raise ValueError(fault)
        return lark

    def _last_words(self) -> ValueError | CheckLostError:
        """Why it ended."""
        code = self._process.returncode
        if code == -signal.SIGPROF:
            return ValueError(f"it takes over {MAX_SECONDS:g} s to compile")
        if code == -signal.SIGABRT:
            return ValueError(f"it takes over {MAX_BYTES >> 20} MiB to compile")
        if -code in _FROM_OUTSIDE and not self._stuck:
            name = signal.Signals(-code).name
            return CheckLostError(f"the process that checked it was ended from outside ({name})")
        return ValueError(f"the compiler failed on it (exit {code})")

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:  # what was not written no longer matters
                continue
        try:
            self._process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ask(self, line: str) -> bytes | None:
        """Send a line, return the answer's; None if the process has ended or had to be before its end."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        watchdog = threading.Timer(MAX_WALL_SECONDS, self._end_stuck)
        watchdog.start()
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            return None
        finally:
            watchdog.cancel()
        return answer if answer.endswith(b"\n") else None

    def _end_stuck(self) -> None:
        self._stuck = True
        self._process.kill()
