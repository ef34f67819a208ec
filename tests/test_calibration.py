"""A machine's calibration: which layers are timed, and a tiny model's times that a plan can be made from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jaxserve.calibration import Calibration, cut_model, deepest_cut
from jaxserve.config import LayerKind, ModelConfig
from jaxserve.plan import StepShape
from jaxserve.planning import MODELS, Footprint
from jaxserve.planning.meshes import ALONE
from jaxserve.planning.plan_records import Sizes
from jaxserve.planning.precision import find_precision

TINY = ModelConfig(
    family="llama",
    vocab_size=128,
    hidden_size=32,
    intermediate_size=64,
    num_heads=2,
    num_kv_heads=1,
    head_size=16,
    layers=(LayerKind(),) * 2,
    max_position=256,
)


def test_small_models_are_timed_whole_and_large_ones_cut() -> None:
    assert deepest_cut(TINY, 2**30) == TINY
    llama = MODELS["llama-3.1-8b"]
    assert deepest_cut(llama, 2**30).num_layers == 2
    room = Footprint.of(replace(llama, layers=llama.layers[:7])).weight_bytes("float32")
    assert deepest_cut(llama, room).num_layers == 7


def test_a_cut_has_every_kind_of_layer() -> None:
    pattern = (LayerKind(window=64),) * 5 + (LayerKind(),)
    mixed = replace(TINY, layers=pattern * 4 + (LayerKind(window=64),))
    assert cut_model(mixed, 4) == mixed
    assert cut_model(mixed, 1).layers == (*pattern, LayerKind(window=64))
    assert cut_model(mixed, 2).num_layers == 13


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_times_of_a_tiny_model(precision: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In int8, where there are kernels for it, the engine that is served has no shapes for decoding alone."""
    monkeypatch.setenv("JAXSERVE_HOME", str(tmp_path))
    stages: list[str] = []
    sizes = Sizes(num_slots=2, max_chunk=64, max_model_len=128)
    calibration = Calibration(TINY, sizes, on_progress=stages.append)
    cost = calibration.cost(find_precision(precision))
    assert calibration.cost(find_precision(precision)) is cost
    assert stages == ["measuring this machine's bandwidth and arithmetic", f"measuring steps in {precision}"]
    assert calibration.chip.memory_bandwidth > 1e8
    assert calibration.chip.peak("float32") > 1e8
    assert (cost.kv_format, cost.page_size, cost.mesh) == ("float32", 16, ALONE)
    for shape in (StepShape(1, 1, 1, decode=True), StepShape(2, 2, 2, decode=True), StepShape(64, 2, 2)):
        seconds = cost.step_seconds(shape, np.array([10]), np.array([1]))
        assert 1e-6 < seconds < 10
