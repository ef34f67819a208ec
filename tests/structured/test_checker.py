"""The processes that try grammars out may be ended from outside, which no client is to notice."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

pytest.importorskip("llguidance", reason="needs the server extra")

from jaxserve.plan import Grammar
from jaxserve.structured.checker import GrammarChecker
from jaxserve.structured.vocabulary import GrammarVocabulary

VOCABULARY = GrammarVocabulary((*(bytes([value]) for value in range(256)), b"<eos>"))


def children() -> list[int]:
    """Of this thread, as Linux lists them."""
    listed = Path(f"/proc/self/task/{os.getpid()}/children")
    if not listed.is_file():
        pytest.skip("the system does not list a process' children")
    return [int(pid) for pid in listed.read_text().split()]


def test_a_process_that_died_idle_is_replaced() -> None:
    checker = GrammarChecker(VOCABULARY, 1)
    before = set(children())
    try:
        first = checker.check(Grammar("regex", "a+"))
        (pid,) = set(children()) - before
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert checker.check(Grammar("regex", "a+")) == first
        with pytest.raises(ValueError, match="regex"):
            checker.check(Grammar("regex", "(a"))
    finally:
        checker.close()
