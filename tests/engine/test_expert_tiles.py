"""How many rows of an expert are multiplied at a time: few tiles, or one number where sums must be alike."""

from __future__ import annotations

import pytest

from jaxserve.model.experts import expert_tile_rows
from jaxserve.planning.models import find_model
from pallas_kernels.dispatch import Target


@pytest.mark.parametrize(
    ("model", "num_rows", "platform", "expected"),
    [
        ("mixtral-8x7b", 2048, "tpu", 256),  # of 512 rows an expert
        ("mixtral-8x7b", 128, "tpu", 32),
        ("mixtral-8x7b", 2048, "cpu", 16),
        ("qwen3-30b-a3b", 2048, "gpu", 128),
        ("qwen3-30b-a3b", 2000, "tpu", 128),
        ("qwen3-30b-a3b", 128, "tpu", 16),
        ("qwen3-30b-a3b", 8, "tpu", 8),
    ],
)
def test_tiles_hold_the_rows_of_a_mean_expert(
    model: str, num_rows: int, platform: str, expected: int
) -> None:
    assert expert_tile_rows(num_rows, find_model(model), Target(platform), exact=False) == expected


@pytest.mark.parametrize("num_rows", [8, 128, 2048])
def test_where_sums_are_in_one_order_tiles_are_of_one_size(num_rows: int) -> None:
    assert expert_tile_rows(num_rows, find_model("mixtral-8x7b"), Target("tpu"), exact=True) == 16
