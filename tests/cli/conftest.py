"""A fake model that every name opens, and the program in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

import jaxserve.opened_model
from tests.conftest import REPOSITORY
from tests.fake_model import FakeModel


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> FakeModel:
    """A fake model, which every name opens."""
    return opening(monkeypatch, FakeModel())


def opening(monkeypatch: pytest.MonkeyPatch, model: FakeModel) -> FakeModel:
    def open_model(name: str, *, progress: bool) -> FakeModel:
        if name == "nonesuch":
            raise ValueError("'nonesuch' names no model")
        return model

    monkeypatch.setattr(jaxserve.opened_model, "open_model", open_model)
    return model


def run_cli(*arguments: str, program: str = "-mjaxserve", **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, program, *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "COLUMNS": "80"},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
        **options,
    )
