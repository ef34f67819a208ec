"""The checked-in code of the native protocol is what the protocol says now."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from server.proto.generate import GENERATED, TOOLS_VERSION, generate

ROOT = Path(__file__).resolve().parents[2]


def test_the_generated_code_is_current(tmp_path: Path) -> None:
    try:
        found = importlib.metadata.version("grpcio-tools")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("needs grpcio-tools")
    if found != TOOLS_VERSION:
        pytest.skip(f"needs grpcio-tools {TOOLS_VERSION}, found {found}: another version writes other code")
    generate(tmp_path)
    for name in GENERATED:
        assert (tmp_path / name).read_bytes() == (ROOT / name).read_bytes(), (
            f"{name} is stale: run `python -m server.proto.generate`"
        )


def test_another_version_of_the_tools_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.0.1")
    with pytest.raises(RuntimeError, match=r"0\.0\.1"):
        generate(tmp_path)
    assert not list(tmp_path.iterdir())
