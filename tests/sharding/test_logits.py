"""In bfloat16 a mesh is as near to float32 as one device is."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.sharding.eight import report_of

MESHES = (
    *("tensor=4", "pipe=2", "expert=4", "data=2"),
    *("tensor=2,pipe=2", "tensor=2,expert=2", "expert=2,pipe=2"),
    *("data=2,tensor=2", "data=2,expert=2", "data=2,pipe=2"),
)
MEAN, MOST = 1.25, 2.0
"""Times what one device is off in bfloat16: that of all tokens, and that of the worst."""


@pytest.mark.slow
def test_log_probabilities_are_off_by_no_more_than_on_one_device(shared_data: Path) -> None:
    cases = json.loads((shared_data / "golden" / "stories260K.json").read_text())["cases"]
    texts = [(case["prompt_ids"] + case["output_ids"])[:60] for case in cases]
    model = shared_data / "models" / "stories260K_moe" / "split4_top4"
    found = report_of("tests.sharding.logits", str(model), *MESHES, given=json.dumps(texts))
    logprobs = {name: np.array(numbers) for name, numbers in found.items()}
    exact = logprobs.pop("float32")
    assert len(exact) == sum(len(text) - 1 for text in texts)
    off = {name: np.abs(numbers - exact) for name, numbers in logprobs.items()}
    alone = off.pop("alone")
    assert 0 < alone.mean() < 0.05
    assert tuple(off) == MESHES
    for mesh, errors in off.items():
        assert errors.mean() <= MEAN * alone.mean(), mesh
        assert errors.max() <= MOST * alone.max(), mesh
