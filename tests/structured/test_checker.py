"""The processes that try grammars out may be ended from outside, which is no grammar's fault."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("llguidance", reason="needs the server extra")

from jaxserve.plan import Grammar
from jaxserve.structured import CheckLostError, GrammarCompiler, checker
from jaxserve.structured.checker import GrammarChecker
from jaxserve.structured.vocabulary import GrammarVocabulary
from tests.fake_model import byte_tokenizer

VOCABULARY = GrammarVocabulary((*(bytes([value]) for value in range(256)), b"<eos>"))
READY = "#!/bin/sh\nread -r vocabulary; echo; read -r grammar; "
"""How a process begins that comes as far as its first grammar."""


@pytest.fixture
def grammars() -> Iterator[GrammarChecker]:
    checker = GrammarChecker(VOCABULARY, 1)
    yield checker
    checker.close()


def children() -> set[int]:
    """Of this thread, as Linux lists them."""
    listed = Path(f"/proc/self/task/{os.getpid()}/children")
    if not listed.is_file():
        pytest.skip("the system does not list a process' children")
    return {int(pid) for pid in listed.read_text().split()}


def first_check(grammars: GrammarChecker) -> int:
    """Have a grammar checked; return the process that did it."""
    before = children()
    grammars.check(Grammar("regex", "first"))
    (pid,) = children() - before
    return pid


def kill_in_a_check(pid: int) -> None:
    """End a process while it has a grammar, which it is given after this."""
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(0.3, os.kill, (pid, signal.SIGKILL)).start()


def stand_in(monkeypatch: pytest.MonkeyPatch, path: Path, script: str) -> None:
    """Start this instead of a process that checks grammars."""
    path.write_text(script)
    path.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(path))


def test_a_process_that_died_idle_is_replaced(grammars: GrammarChecker) -> None:
    pid = first_check(grammars)
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert grammars.check(Grammar("regex", "first"))
    with pytest.raises(ValueError, match="regex"):
        grammars.check(Grammar("regex", "(a"))


def test_a_check_that_is_lost_is_done_again(grammars: GrammarChecker) -> None:
    kill_in_a_check(first_check(grammars))
    assert "b+" in grammars.check(Grammar("regex", "b+"))


def test_a_process_that_is_killed_at_its_start_is_started_again(
    grammars: GrammarChecker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    died = tmp_path / "died"
    script = f'#!/bin/sh\n[ -e {died} ] || {{ : > {died}; kill -KILL $$; }}\nexec {sys.executable} "$@"\n'
    stand_in(monkeypatch, tmp_path / "python", script)
    assert "b+" in grammars.check(Grammar("regex", "b+"))
    assert died.exists()


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (None, "no process to check it in: .*nonesuch"),
        ("#!/bin/sh\nkill -KILL $$\n", "no process to check it in: exit -9"),
        ("#!/bin/sh\nexit 1\n", "no process to check it in: exit 1"),
        (READY + "kill -KILL $$\n", r"was ended from outside \(SIGKILL\)"),
        (READY + "kill -TERM $$\n", r"was ended from outside \(SIGTERM\)"),
        (READY + "printf '[\"torn'; kill -HUP $$\n", r"was ended from outside \(SIGHUP\)"),
    ],
)
def test_a_check_that_is_lost_twice_says_so(
    grammars: GrammarChecker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str | None, reason: str
) -> None:
    if script is None:
        monkeypatch.setattr(sys, "executable", "/nonesuch")
    else:
        stand_in(monkeypatch, tmp_path / "python", script)
    with pytest.raises(CheckLostError, match=reason):
        grammars.check(Grammar("regex", "b+"))
    monkeypatch.undo()
    assert "b+" in grammars.check(Grammar("regex", "b+"))


@pytest.mark.parametrize(
    ("end", "fault"),
    [
        ("kill -PROF $$", "it takes over 1 s to compile"),
        ("kill -ABRT $$", "it takes over 64 MiB to compile"),
        ("kill -SEGV $$", r"the compiler failed on it \(exit -11\)"),
        ("exit 1", r"the compiler failed on it \(exit 1\)"),
        ("printf '[null'; exit 0", r"the compiler failed on it \(exit 0\)"),
        ("exec sleep 60", r"the compiler failed on it \(exit -9\)"),
    ],
)
def test_a_process_that_a_grammar_ends_is_the_grammar_s_fault(
    grammars: GrammarChecker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, end: str, fault: str
) -> None:
    monkeypatch.setattr(checker, "MAX_WALL_SECONDS", 3.0)
    stand_in(monkeypatch, tmp_path / "python", f"{READY}{end}\n")
    with pytest.raises(ValueError, match=fault):
        grammars.check(Grammar("regex", "b+"))


def test_a_lost_check_is_not_kept_as_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_tokenizer()
    with GrammarCompiler(tokenizer, tokenizer.vocab_size, (1,), num_processes=1) as compiler:
        with monkeypatch.context() as broken:
            broken.setattr(sys, "executable", "/nonesuch")
            with pytest.raises(CheckLostError):
                compiler.compile(Grammar("regex", "b+"))
        assert compiler.compile(Grammar("regex", "b+"))
