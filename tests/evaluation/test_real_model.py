"""The gate on real weights: what int8 pages cost SmolLM2, held to the project's own floor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve import open_model
from jaxserve.engine.options import EngineOptions
from jaxserve.evaluation import Floor, Plan, Side, Text, evaluate
from jaxserve.evaluation.measures import SliceReport

NUM_TOKENS = 600
"""Enough where float32 is read as well."""
MANY_TOKENS = 20_440
MEASURED = Path(__file__).parents[2] / "benchmarks" / "results" / "quality-int8-smollm2-135m.json"
"""What float32 reaches on so many, in windows of 512."""
FLOORS = [Floor("perplexity-change", 0.005), Floor("kl", 0.002), Floor("kl-p99", 0.02), Floor("top1", 0.97)]


@pytest.mark.real
@pytest.mark.slow
def test_int8_pages_keep_smollm2s_perplexity(shared_data: Path) -> None:
    text = (shared_data / "prompts" / "text" / "wikitext-2_test.txt").read_text(encoding="utf-8")
    model = open_model("smollm2-135m", progress=False)
    common = {"deterministic": True, "num_slots": 1, "max_chunk": 128}
    sides = [
        Side(kv_format, model, EngineOptions(dtype="float32", kv_format=kv_format, **common))
        for kv_format in ("int8", "float32")
    ]
    plan = Plan(texts=[Text("wikitext", text)], floors=FLOORS, context=256, max_tokens=NUM_TOKENS)
    report = evaluate(*sides, plan)
    assert report.passed, report.table()
    (measures,) = [part.measures for part in report.slices]
    assert measures["kl"].value > 1e-5  # A comparison of float32 with itself would pass as well.
    assert report.model.kv_bytes_per_token < 0.3 * report.reference.kv_bytes_per_token


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_int8_keeps_smollm2s_perplexity_on_twenty_thousand_tokens(shared_data: Path) -> None:
    part = many_tokens(shared_data, {"kv_format": "int8"}, [Floor("perplexity-change", 0.005)])
    assert above_float32(part, part.measures["perplexity"].reference) < 0.015


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_fp8_keeps_smollm2s_perplexity_on_twenty_thousand_tokens(shared_data: Path) -> None:
    part = many_tokens(shared_data, {"quantize": "fp8"}, [Floor("kl", 0.03), Floor("top1", 0.9)])
    assert above_float32(part, part.measures["perplexity"].value) < 0.02


def many_tokens(shared_data: Path, changes: dict[str, Any], floors: list[Floor]) -> SliceReport:
    """What int8 with these changes reaches beside int8, held to floors."""
    text = (shared_data / "prompts" / "text" / "wikitext-2_test.txt").read_text(encoding="utf-8")
    model = open_model("smollm2-135m", progress=False)
    common = {"quantize": "int8", "kv_format": "float32", "deterministic": True, "num_slots": 1}
    sides = [
        Side(name, model, EngineOptions(**{**common, **given}))
        for name, given in (("changed", changes), ("int8", {}))
    ]
    plan = Plan(texts=[Text("wikitext", text)], floors=floors, context=512, max_tokens=MANY_TOKENS)
    report = evaluate(*sides, plan)
    assert report.passed, report.table()
    (part,) = report.slices
    assert part.size >= 20_000
    return part


def above_float32(part: SliceReport, perplexity: float | None) -> float:
    """By how much of float32's a perplexity of so many tokens is higher."""
    (full,) = json.loads(MEASURED.read_text())["slices"]
    assert full["size"] == part.size
    assert perplexity is not None
    return perplexity / full["measures"]["perplexity"]["reference"] - 1.0
