"""The command line itself: help, usage, sizes, what is refused, `pull`, and commands that others add."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxserve import __version__
from jaxserve.cli import main
from jaxserve.commands.options import parse_size
from jaxserve.plan import StepHandle, StepResult
from tests.cli.conftest import opening, run_cli
from tests.fake_engine import FakeEngine
from tests.fake_model import FakeModel


def test_help_fits_a_screen() -> None:
    lines = run_cli("--help").stdout.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert {"pull", "generate", "chat"} <= {line.split()[0] for line in lines if line.strip()}


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["generate", "--help"], ["chat", "--help"]])
def test_help_and_version_are_quick(arguments: list[str]) -> None:
    code = (
        "import sys, atexit\n"
        "atexit.register(lambda: print('heavy:', {'jax', 'numpy', 'tokenizers', 'tqdm'} & {*sys.modules}))\n"
        f"from jaxserve.cli import main; main({arguments})"
    )
    result = run_cli(code, program="-c")
    assert result.returncode == 0
    assert result.stdout.splitlines()[-1] == "heavy: set()"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out == f"jaxserve {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "COMMAND"),
        (["nonesuch"], "invalid choice: 'nonesuch'"),
        (["generate"], "MODEL"),
        (["generate", "m", "--prompt", "a", "--prompt-file", "b"], "not allowed with"),
        (["generate", "m", "--kv-memory", "lots"], "'lots' is no size"),
        (["generate", "m", "--dtype", "float16"], "invalid choice: 'float16'"),
    ],
)
def test_wrong_usage(capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nonesuch", "-p", "a"], "'nonesuch' names no model"),
        (["m", "-p", "a", "--temperature", "-1"], "temperature -1.0 is out of range"),
        (["m", "-p", "a", "--n", "0"], "n 0 is out of range"),
        (["m", "-p", "  "], "the prompt is empty"),
        (["m", "-p", "a" * 200], "the limit is 127"),
        (["m", "-p", "a", "--logprobs", "2"], "--logprobs needs --json"),
        (["m", "-p", "a", "--json", "--logprobs", "9"], "logprobs 9 is above the limit, 5"),
        (["m", "--prompt-file", "/no/such/file"], "/no/such/file"),
        (["m", "-p", "a", "--raw", "--system", "b"], "--system needs"),
    ],
)
def test_bad_input_is_one_sentence(
    model: FakeModel, capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str
) -> None:
    assert main(["generate", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("jaxserve generate: error: ")
    assert captured.err.count("\n") == 1
    assert complaint in captured.err


def test_a_fault_of_the_program_is_no_bad_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Faulty(FakeEngine):
        def collect(self, handle: StepHandle) -> StepResult:
            raise RuntimeError("the device has gone")

    opening(monkeypatch, FakeModel(Faulty))
    with pytest.raises(RuntimeError, match="the device has gone"):
        main(["generate", "m", "-p", "a"])


@pytest.mark.parametrize(
    ("text", "size"), [("4096", 4096), ("2k", 2048), ("512M", 2**29), ("1.5GiB", 3 * 2**29), ("1TB", 2**40)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "-1", "M", "1P", "1 G B"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is no size"):
        parse_size(text)


# pull and added commands -----------------------------------------------------------------------------------


def test_pull_prints_where_the_model_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("JAXSERVE_HOME", str(tmp_path))
    cached = tmp_path / "models" / "smollm2-135m" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    cached.parent.mkdir(parents=True)
    cached.touch()
    assert main(["pull", "smollm2-135m"]) == 0
    assert capsys.readouterr().out == f"{cached}\n"
    assert main(["pull", "nonesuch"]) == 2


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """An installed package with three commands, one of them broken and one that has a built-in's name."""
    (tmp_path / "extra-1.0.dist-info").mkdir()
    (tmp_path / "extra-1.0.dist-info" / "METADATA").write_text("Name: extra\nVersion: 1.0\n")
    (tmp_path / "extra-1.0.dist-info" / "entry_points.txt").write_text(
        "[jaxserve.commands]\nhello = extra_commands:hello\nbroken = extra_nonesuch:x\n"
        "pull = extra_commands:hello\n"
    )
    (tmp_path / "extra_commands.py").write_text(
        "class Hello:\n"
        "    name, help = 'hello', 'greet somebody'\n"
        "    def add_arguments(self, parser):\n        parser.add_argument('who')\n"
        "    def run(self, args):\n        print('hello', args.who)\n        return 3\n"
        "hello = Hello()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("extra_commands", None)


@pytest.mark.usefixtures("added")
def test_other_packages_add_commands(capsys: pytest.CaptureFixture[str], model: FakeModel) -> None:
    assert main(["generate", "m", "-p", "a", "--max-tokens", "1"]) == 0
    assert "extra_commands" not in sys.modules
    capsys.readouterr()
    assert main(["hello", "you"]) == 3
    assert capsys.readouterr().out == "hello you\n"
    assert main(["broken"]) == 2
    assert "cannot load extra_nonesuch:x: No module named" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--help"])
    out = capsys.readouterr().out
    assert "greet somebody" in out
    assert "cannot load extra_nonesuch" in " ".join(out.split())


def test_a_file_that_cannot_be_read_is_named(
    model: FakeModel, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["generate", "m", "-f", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"jaxserve generate: error: {tmp_path}: is a directory\n"

    def refuse(self: Path, encoding: str) -> str:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_text", refuse)
    assert main(["generate", "m", "-f", "secret"]) == 2
    assert "secret: permission denied; make it readable for this user" in capsys.readouterr().err


@pytest.mark.usefixtures("added")
def test_a_mistyped_command_is_told_of_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["helo", "you"])
    assert left.value.code == 2
    err = capsys.readouterr().err
    for name in ("'helo'", "generate", "pull", "hello"):
        assert name in err
