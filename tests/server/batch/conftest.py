"""The batch command over the fake model, and files for it."""

from __future__ import annotations

import fcntl
import json
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from jaxserve.cli import main
from jaxserve.offline import OfflineLoop
from jaxserve.opened_model import make_loop
from server.batch.files import BatchFiles
from server.batch.requests import Preparer
from server.batch.run import READ_AHEAD, BatchReport, BatchRun, Progress
from server.core.intake import Intake
from server.http.tool_speech import ToolSpeech
from tests.cli.conftest import opening
from tests.conftest import REPOSITORY
from tests.fake_engine import FakeEngine
from tests.fake_model import CACHE, FakeModel, byte_tokenizer, fake_limits

Json = dict[str, Any]
Run = Callable[..., int]

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GREEDY: Json = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, "return_token_ids": True}


def completion(custom_id: str, prompt: object = "one", **body: object) -> Json:
    return request(custom_id, COMPLETIONS, {"prompt": prompt, **GREEDY, **body})


def chat(custom_id: str, text: str = "Hello!", **body: object) -> Json:
    messages = [{"role": "user", "content": text}]
    return request(custom_id, CHAT, {"messages": messages, **GREEDY, **body})


def request(custom_id: str, url: str, body: Mapping[str, object]) -> Json:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": dict(body)}


def write_lines(path: Path, lines: Iterable[Json | str]) -> Path:
    """A file of these lines: objects as JSON, texts as they are."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return path


def read_lines(path: Path) -> list[Json]:
    text = path.read_text(encoding="utf-8")
    assert text == "" or text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def by_name(path: Path) -> dict[str, Json]:
    """Records by their custom_id, which each has to itself."""
    records = read_lines(path)
    named = {record["custom_id"]: record for record in records}
    assert len(named) == len(records)
    return named


def install_command(folder: Path) -> None:
    """Make `batch` a command of whoever has this folder on its path, as installing the project does."""
    entry = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    group = entry["project"]["entry-points"]["jaxserve.commands"]
    (folder / "batch_command-1.dist-info").mkdir(parents=True)
    info = folder / "batch_command-1.dist-info"
    (info / "METADATA").write_text("Name: batch-command\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[jaxserve.commands]\nbatch = {group['batch']}\n")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeModel:
    """The model that every name opens."""
    install_command(tmp_path / "installed")
    monkeypatch.syspath_prepend(tmp_path / "installed")
    return opening(monkeypatch, FakeModel())


@pytest.fixture
def run(fake: FakeModel, tmp_path: Path) -> Run:
    """Runs `jaxserve batch fake IN OUT` on these lines, or on `in.jsonl` as it is."""

    def run_batch(lines: Iterable[Json | str] | None = None, *arguments: str) -> int:
        if lines is not None:
            write_lines(tmp_path / "in.jsonl", lines)
        paths = (str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"))
        return main(["batch", "fake", *paths, *arguments])

    return run_batch


def run_over(
    batch: Path,
    answers: Path,
    device: FakeEngine | None = None,
    read_ahead: int = READ_AHEAD,
    on_progress: Progress = lambda done, tokens: None,
) -> BatchReport:
    """One run in this process, without the command."""
    device = device or FakeEngine(fake_limits())
    tokenizer = byte_tokenizer()
    loop = make_loop(device, tokenizer, cache=CACHE)
    intake = Intake(tokenizer, loop.limits, {})
    preparer = Preparer("fake", tokenizer, loop, intake, ToolSpeech("auto"))
    with BatchFiles(batch, answers) as files:
        runner = BatchRun(
            files,
            preparer,
            OfflineLoop(loop),
            num_slots=loop.limits.num_slots,
            read_ahead=read_ahead,
            on_progress=on_progress,
        )
        try:
            report = runner.run()
            files.finish()
        finally:
            loop.check_integrity()
            assert loop.num_open == loop.num_running == 0 or loop.failure is not None
    return report


def removing_before_the_lock(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have another process remove the file between its opening and its first lock."""
    flock, left = fcntl.flock, [path]

    def lock(file: BinaryIO, operation: int) -> None:
        if left:
            left.pop().unlink()
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", lock)


def comparable(record: Json) -> Json:
    """A record without what differs from run to run: names, times, and what was reused."""
    record = json.loads(json.dumps(record))
    response = record["response"]
    if response is not None:
        response["request_id"] = ""
        response["body"] |= {"id": "", "created": 0, "system_fingerprint": ""}
        if "usage" in response["body"]:
            del response["body"]["usage"]["prompt_tokens_details"]
        for choice in response["body"].get("choices", ()):
            for call in choice.get("message", {}).get("tool_calls", ()):
                call["id"] = ""
    return record
