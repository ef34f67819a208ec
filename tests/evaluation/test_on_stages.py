"""`jaxserve evaluate` on a mesh with stages measures what it does on one device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.sharding.eight import NOT_OPTIMISED

ROOT = Path(__file__).resolve().parents[2]
TEXT = """Once upon a time there was a little girl called Lily. She liked to play in the park with her dog.
One day the dog ran away and Lily was very sad. She looked for him in the garden and behind the tree. Then she
heard a small noise. The dog was under the big red box, and he was happy to see her."""


def report(folder: Path, here: Path, mesh: str) -> Any:
    target = here / f"{mesh}.json"
    sizes = ["--context", "64", "--max-chunk", "32", "--max-model-len", "128", "--slots", "2"]
    asked = [
        "--text",
        str(here / "text.txt"),
        "--prompts",
        str(here / "asked.jsonl"),
        "--answer-tokens",
        "16",
    ]
    command = [
        sys.executable,
        "-m",
        "jaxserve",
        "evaluate",
        str(folder),
        "--kv-format",
        "int8",
        *sizes,
        *asked,
    ]
    process = subprocess.run(
        [*command, "--mesh", mesh, "--json", str(target)],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"} | NOT_OPTIMISED,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    return json.loads(target.read_text())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_stages_measure_as_one_device(shared_data: Path, tmp_path: Path) -> None:
    folder = shared_data / "models" / "stories260K" / "hf"
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "asked.jsonl").write_text(json.dumps({"prompt": "Once upon a time", "answer": "7"}) + "\n")
    alone, staged = (report(folder, tmp_path, mesh) for mesh in ("tensor=1", "tensor=2,pipe=2"))
    assert staged["model"]["options"]["mesh"] == "tensor=2,pipe=2"
    of_text = [next(one for one in told["slices"] if one["name"] == "text/text") for told in (alone, staged)]
    expected, found = (
        {
            (name, side): number
            for name, measure in one["measures"].items()
            for side, number in measure.items()
            if number is not None
        }
        for one in of_text
    )
    assert found == pytest.approx(expected, rel=1e-3)
    assert 1.1 < of_text[0]["measures"]["perplexity"]["reference"] < 50
    assert alone["answers"][0]["reference"]
    assert staged["answers"][0]["reference"] == alone["answers"][0]["reference"]
