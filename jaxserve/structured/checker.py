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
        saying what is wrong or which limit was passed.
        """
        process = self._idle.get()
        try:
            if process is not None and not process.alive:
                # It was ended from outside while it had nothing to do, which is not this grammar's fault.
                process.close()
                process = None
            if process is None:
                process = _CheckerProcess(self._vocabulary)
            answer = process.ask(grammar)
            if answer is None:
                raise ValueError(process.last_words())
        finally:
            self._idle.put(process if process is not None and process.alive else None)
        lark, fault = answer
        if lark is None:
            raise ValueError(fault)
        return lark

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
        # Neither fork, unsafe beside jax's threads, nor multiprocessing's spawn, which runs a user's script
        # again.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "jaxserve.structured.checker_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a terminal's interrupt is for the server to handle
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        if not self._ask(json.dumps([token.decode("latin-1") for token in vocabulary.tokens])):
            self.close()
            raise RuntimeError(f"no process to check grammars in: exit {self._process.returncode}")

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, grammar: Grammar) -> tuple[str | None, str | None] | None:
        """What the process says of a grammar; None if it did not outlive it."""
        line = self._ask(json.dumps([grammar.kind, grammar.text]))
        if line:
            return json.loads(line)
        self.close()
        return None

    def last_words(self) -> str:
        """Why it ended."""
        code = self._process.returncode
        if code == -signal.SIGPROF:
            return f"it takes over {MAX_SECONDS:g} s to compile"
        if code == -signal.SIGABRT:
            return f"it takes over {MAX_BYTES >> 20} MiB to compile"
        return f"the compiler failed on it (exit {code})"

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

    def _ask(self, line: str) -> bytes:
        """Send a line, return the answer's; nothing if the process has ended or had to be."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        watchdog = threading.Timer(MAX_WALL_SECONDS, self._process.kill)
        watchdog.start()
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
            return self._process.stdout.readline()
        except BrokenPipeError:
            return b""
        finally:
            watchdog.cancel()
