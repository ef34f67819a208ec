"""Recipes held to floors on a small trained model, whose file has 32 bits: SmolLM2's has four already."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxserve import open_model
from jaxserve.engine.options import EngineOptions
from jaxserve.evaluation import EvaluationReport, Floor, Plan, Side, Text, evaluate

FLOORS = {
    "int8": [Floor("perplexity-change", 0.015), Floor("kl", 0.002), Floor("top1", 0.97)],
    "int4": [Floor("perplexity", 1.10), Floor("kl", 0.10), Floor("top1", 0.82)],
}
"""A model of 260,000 parameters has none to spare: on a large one four bits cost a tenth of this."""


@pytest.fixture(scope="module")
def story(shared_data: Path) -> str:
    """What the model itself says, greedily: a text of its own kind."""
    golden = json.loads((shared_data / "golden" / "stories260K.json").read_text(encoding="utf-8"))
    return "\n".join(case["text"] for case in golden["cases"])


@pytest.fixture(scope="module")
def measure(shared_data: Path, story: str) -> Callable[[str, list[Floor]], EvaluationReport]:
    model = open_model(shared_data / "models" / "stories260K" / "hf", progress=False)

    def run(recipe: str, floors: list[Floor]) -> EvaluationReport:
        common = {"deterministic": True, "num_slots": 1, "max_chunk": 128, "kv_format": "float32"}
        sides = [
            Side(quantize, model, EngineOptions(quantize=quantize, **common)) for quantize in (recipe, "f32")
        ]
        return evaluate(*sides, Plan(texts=[Text("story", story)], floors=floors, context=256))

    return run


@pytest.mark.parametrize("recipe", FLOORS)
def test_a_recipe_keeps_its_floors(
    recipe: str, measure: Callable[[str, list[Floor]], EvaluationReport]
) -> None:
    report = measure(recipe, FLOORS[recipe])
    assert report.passed, report.table()
    (measures,) = [part.measures for part in report.slices]
    assert measures["kl"].value > 1e-5  # A comparison of float32 with itself would pass as well.


def test_fewer_scales_and_a_coarse_embedding_miss_them(
    measure: Callable[[str, list[Floor]], EvaluationReport],
) -> None:
    report = measure("*=int4-128", FLOORS["int4"])
    assert [str(verdict.floor.measure) for verdict in report.failures] == ["perplexity", "kl", "top1"]
    assert not measure("int4", FLOORS["int8"]).passed
