"""The reader of the TPU compiler's schedules, on a small one made by hand."""

from __future__ import annotations

import pytest

from benchmarks.bundles import UNITS, parse_bundles, working_loops

CAPACITY = "2 2 4 2 1 3 3 2 2 2"
LISTING = """\
= control target key start
LB: loop body
     0   :  { %s1 = smov 0 }
   0x1 LB: > { %s2 = sadd.s32 1, %s1 }
   0x2   : > { %1 = sbr.rel (%p1) target = $region5 }
   0x3   : > { %s3 = sadd.s32 1, %s2 }
   0x4   :  { }
   0x5   : > { %s4 = sadd.s32 1, %s3 }
   0x6   : > { %s5 = sadd.s32 1, %s4 }
   0x7   : > { %2 = vst [vmem:%s5] %v1
 continued }
   0x8 PF: > { %3 = vmatmul.bf16 %v1, %v2  ;;  %4 = vld [vmem:%s6] }
   0x9 LB: >> { %5 = vadd.f32 %v1, %v2 }
   0xa   : > { %6 = vmatmul.bf16 %v3, %v4 }
   0xb PF:  { %s9 = smov 1 }
"""
MULTIPLIES = (8, 10)
LOADS_AND_SPILLS = 8


def table() -> str:
    rows = ["0 0 0 0 0 0 0 0 0 0"] * 12
    for number in MULTIPLIES:
        rows[number] = "1 0 0 0 0 0 0 0 0 0"
    rows[LOADS_AND_SPILLS] = "2 0 0 0 0 1 0 0 1 0"
    return "\n".join(["== CAPACITY:", ", ".join(UNITS), CAPACITY, "== UTILIZATION:", *rows])


def test_a_loop_counts_its_own_bundles_and_no_branch_that_only_tidies_up() -> None:
    (loop,) = working_loops(parse_bundles(LISTING, table()))
    # Of the ten at its depth, the store after the branch's delay is skipped; the inner loop is another's.
    assert len(loop) == 8
    assert loop.mxu_share == 2 / 8
    assert loop.total("MXU") == 3
    assert (loop.total("VLOAD"), loop.total("SPILL"), loop.total("FILL")) == (1, 1, 0)


def test_a_bundle_that_the_loop_around_lent_an_instruction_is_still_the_inner_loops() -> None:
    lent = LISTING.replace("  0x9 LB: >> {", "  0x9   : >> {").replace("  0x8 PF: > {", "  0x8   : > {")
    lent = lent.replace("  0x7   : > {", "  0x7 LB: >> {")
    assert [bundle.depth for bundle in parse_bundles(lent, table())][6:11] == [1, 2, 2, 2, 1]


def test_a_branch_that_fetches_pages_counts() -> None:
    fetching = LISTING.replace("%2 = vst [vmem:%s5] %v1", "%2 = dma.hbm_to_vmem %s5")
    (loop,) = working_loops(parse_bundles(fetching, table()))
    assert len(loop) == 9


def test_files_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(ValueError, match="12 bundles in the listing and 11 in the table"):
        parse_bundles(LISTING, table().rsplit("\n", 1)[0])
