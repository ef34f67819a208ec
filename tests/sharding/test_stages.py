"""How layers are dealt out to the stages of a pipeline."""

from __future__ import annotations

import dataclasses
import re

import pytest

from jaxserve.config import LayerKind
from jaxserve.engine.build import resolve_config
from jaxserve.engine.memory import weight_bytes
from jaxserve.engine.mesh import spread_model
from jaxserve.engine.options import EngineOptions
from jaxserve.model.stages import stages_of
from jaxserve.planning.models import find_model
from sharding import parse_mesh
from tests.sharding.test_mesh import DENSE, MODEL

WINDOWED, FULL, EXPERTS = LayerKind(window=12), LayerKind(), LayerKind(experts=True)


@pytest.mark.parametrize(
    ("layers", "number", "padded", "runs"),
    [
        ((FULL,) * 8, 2, 4, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ((FULL,) * 5, 4, 2, [[0, 1], [2], [3], [4]]),
        ((WINDOWED, FULL) * 3, 2, 4, [[0, 1, 2, 3], [4, 5]]),
        # What is left over of a pattern comes last, and the first stage has padding for it.
        (((WINDOWED,) * 2 + (FULL,)) * 4 + (WINDOWED,) * 2, 2, 8, [[*range(6)], [*range(6, 14)]]),
        ((FULL,) + (EXPERTS,) * 5, 3, 3, [[0, 1], [2, 3], [4, 5]]),
    ],
    ids=["even", "uneven", "pattern", "rest", "dense_first"],
)
def test_every_layer_is_in_one_stage_in_order(
    layers: tuple[LayerKind, ...], number: int, padded: int, runs: list[list[int]]
) -> None:
    stages = stages_of(dataclasses.replace(MODEL, layers=layers), number)
    assert stages.model.num_layers == padded
    assert [[layer for layer in stage if layer is not None] for stage in stages.layers] == runs
    for stage in stages.layers:
        for kind, layer in zip(stages.model.layers, stage, strict=True):
            assert layer is None or layers[layer] == kind


@pytest.mark.parametrize(
    ("layers", "mesh", "message"),
    [
        (
            (FULL,) * 3,
            "pipe=4",
            "mesh pipe=4: layers has size 3, in 3 repetitions that stay whole, which are fewer than 4 "
            "stages of mesh axis 'pipe'; nearest to it are pipe=2",
        ),
        (
            (WINDOWED, FULL) * 2,
            "tensor=2,pipe=4",
            "layers has size 4, in 2 repetitions that stay whole, .* nearest to it are tensor=2,pipe=2",
        ),
        (
            (FULL,) * 8,
            "tensor=8,pipe=3",
            "vocab has size 256, which the 24 devices of 'pipe' and 'tensor' do not divide; nearest to it "
            "are tensor=8,pipe=2 or tensor=8,pipe=4",
        ),
    ],
    ids=["few_layers", "few_repetitions", "vocab"],
)
def test_stages_that_a_model_cannot_have_are_refused(
    layers: tuple[LayerKind, ...], mesh: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        spread_model(dataclasses.replace(DENSE, layers=layers), parse_mesh(mesh))


def test_drafts_by_the_first_layers_are_refused() -> None:
    options = EngineOptions(speculative="skip:1", kv_memory=10**7)
    model = dataclasses.replace(DENSE, layers=(FULL,) * 4)
    message = re.escape("speculative 'skip:1' on mesh pipe=2: the first layers draft where all layers are")
    with pytest.raises(ValueError, match=message):
        resolve_config(model, options, "cpu", "float32", 128, parse_mesh("pipe=2"))


def test_padding_takes_its_share_of_weights_and_pages() -> None:
    model = find_model("llama-3.1-70b")
    half, third = (
        weight_bytes(model, "bfloat16", "stacked", None, parse_mesh(f"tensor=8,pipe={stages}"))
        for stages in (2, 4)
    )
    assert half == pytest.approx(2 * third, rel=0.01)
    uneven = dataclasses.replace(model, layers=model.layers[:78])
    options = EngineOptions(kv_memory=2**34)

    def pages(mesh: str) -> int:
        return resolve_config(uneven, options, "tpu", "bfloat16", 8192, parse_mesh(mesh)).cache.num_pages[0]

    # Of 78 layers four stages have 20 each.
    assert pages("tensor=8,pipe=4") == pytest.approx(pages("tensor=8") * 78 / 80, abs=1)
