"""The TPU kernel that writes keys and values, bit for bit what the scatter writes."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dispatch import Target, choose
from pallas_kernels.kv_write import kv_write
from pallas_kernels.kv_write.api import IMPLEMENTATIONS
from pallas_kernels.page_layout import PageLayout

NUM_PAGES, LAYER = 40, 1
SINK = 0
Arrays = tuple[jax.Array, jax.Array | None]

LAYOUTS = (
    PageLayout(64, 2, 128, NUM_PAGES, "bfloat16", "bfloat16"),
    PageLayout(16, 3, 64, NUM_PAGES, "float32", "float32"),
    PageLayout(32, 1, 256, NUM_PAGES, "bfloat16", "bfloat16"),
    PageLayout(64, 2, 64, NUM_PAGES, "int8", "int8"),
    PageLayout(128, 2, 80, NUM_PAGES, "int8", "int8"),
    PageLayout(256, 1, 96, NUM_PAGES, "int8", "int8"),
    PageLayout(64, 2, 128, NUM_PAGES, "float8_e4m3fn", "float8_e4m3fn"),
)
CHUNKS = ((5, 1), (30, 40), (0, 1), (67, 3), (7, 84), (0, 200))
"""Of sequences: tokens before, and of this step. More rows than the kernel takes at a time."""
SINGLES = tuple((length, 1) for length in (0, 63, 64, 17, 300))


def places(
    layout: PageLayout, sequences: tuple[tuple[int, int], ...], seed: int
) -> tuple[jax.Array, jax.Array]:
    """Page and offset of each row, pages random, with rows between and after that nobody owns."""
    pages = iter(np.random.default_rng(seed).permutation(np.arange(1, NUM_PAGES)).tolist())
    rows: list[tuple[int, int]] = []
    for before, number in sequences:
        own = [
            next(pages) for _ in range(-(-(before + number) // layout.page_size) - before // layout.page_size)
        ]
        first = before // layout.page_size
        rows += [
            (own[position // layout.page_size - first], position % layout.page_size)
            for position in range(before, before + number)
        ]
        rows.append((SINK, 0))
    rows += [(SINK, 3)] * 5
    page_T, offset_T = np.array(rows, np.int32).T
    return jnp.asarray(page_T + LAYER * NUM_PAGES), jnp.asarray(offset_T)


def write(layout: PageLayout, by: str, place: tuple[jax.Array, jax.Array], compute: str) -> Arrays:
    """Into a pool of random numbers, NaNs among them."""
    rng = np.random.default_rng(3)
    stored = rng.normal(0, 50, layout.pool_shape(2)).astype(np.float32)
    if layout.kv_format != "int8":
        stored[:, ::7] = np.nan
    scales = jnp.asarray(rng.random(layout.scales_shape(2), np.float32)) if layout.quantised else None
    shape = place[0].shape[0], layout.num_kv_heads, layout.head_size
    k, v = (rng.normal(size=shape) for _ in range(2))
    k[0] = 0.0
    target = Target(overrides=(("kv_write", by),))

    @jax.jit
    def run(pool: jax.Array, scales: jax.Array | None, *new: jax.Array) -> Arrays:
        return kv_write(pool, scales, *new, layout=layout, target=target)

    new = jnp.asarray(k, compute), jnp.asarray(v, compute)
    return run(layout.to_storage(jnp.asarray(stored)), scales, *new, *place)


@pytest.mark.parametrize("sequences", [CHUNKS, SINGLES], ids=["chunks", "singles"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_tpu_kernel_writes_the_same_bits(
    layout: PageLayout, sequences: tuple[tuple[int, int], ...]
) -> None:
    place = places(layout, sequences, len(sequences))
    # Of bfloat16 some numbers lie half-way between two of eight bits, which are rounded either way.
    compute = "bfloat16" if layout.kv_format == "bfloat16" else "float32"
    found, expected = (write(layout, by, place, compute) for by in ("tpu", "reference"))
    for ours, theirs in zip(found, expected, strict=True):
        if theirs is None:
            assert ours is None
            continue
        own = np.arange(2 * NUM_PAGES) != LAYER * NUM_PAGES + SINK
        a, b = (np.asarray(array)[own].view(np.uint8) for array in (ours, theirs))
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"storage": "uint16"}, "pages of bfloat16 are stored as uint16"),
        ({"page_size": 24}, "pages of 24 tokens are no multiple of 16"),
        ({"kv_format": "int8", "storage": "int8", "page_size": 32}, "do not fill rows of 128 lanes"),
    ],
)
def test_a_tpu_scatters_what_the_kernel_cannot_write(changes: dict[str, object], reason: str) -> None:
    layout = dataclasses.replace(LAYOUTS[0], **changes)
    facts = {"layout": layout, "num_rows": 8}
    assert choose("kv_write", IMPLEMENTATIONS, Target("tpu"), **facts)[0].name == "reference"
    assert (
        choose("kv_write", IMPLEMENTATIONS, Target("tpu"), **{**facts, "layout": LAYOUTS[0]})[0].name == "tpu"
    )
    with pytest.raises(ValueError, match=reason):
        choose("kv_write", IMPLEMENTATIONS, Target("tpu", overrides=(("kv_write", "tpu"),)), **facts)
