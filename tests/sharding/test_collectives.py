"""What devices say to each other, counted from the text of a program."""

from __future__ import annotations

import pytest

from jaxserve.engine.collectives import Collective, collectives

LOOP = """\
HloModule jit_step

%add (a: bf16[], b: bf16[]) -> bf16[] {
  %a = bf16[] parameter(0)
  ROOT %sum = bf16[] add(%a, %b)
}

%body.1 (p: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {
  %all-reduce.1 = bf16[4,8]{1,0:T(8,128)(2,1)} all-reduce(%x), channel_id=1, replica_groups=[2,4]<=[8], to_apply=%add
  ROOT %tuple = (s32[], bf16[4,8]) tuple(%i, %all-reduce.1)
}

%report.2 (p: f32[4,8]) -> f32[4,64] {
  ROOT %all-gather.2 = f32[4,64]{1,0} all-gather(%p), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={1}
}

%skip.3 (p: f32[4,8]) -> f32[4,64] {
  ROOT %constant = f32[4,64]{1,0} constant({...})
}

ENTRY %main.4 (p0: bf16[4,8]) -> f32[4,64] {
  %while.1 = (s32[], bf16[4,8]) while(%init), condition=%cond, body=%body.1, backend_config={"known_trip_count":{"n":"80"}}
  %gathered = (f32[2,8]{1,0}, f32[16,8]{1,0}) all-gather-start(%y), replica_groups=[1,8]<=[8], dimensions={0}
  %done = f32[16,8]{1,0} all-gather-done(%gathered)
  ROOT %conditional.2 = f32[4,64]{1,0} conditional(%p, %a, %b), branch_computations={%report.2, %skip.3}
}
"""  # noqa: E501


def test_a_loop_counts_as_often_as_it_turns_and_a_branch_is_told_apart() -> None:
    assert collectives(LOOP) == {
        Collective("all-reduce", 32, 64, 4, False): 80,
        Collective("all-gather", 128, 512, 8, False): 1,
        Collective("all-gather", 256, 1024, 8, True): 1,
    }


TPU_LOOP = """\
HloModule jit_step

%body.1 (p: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {
  %psum.1 = bf16[4,8]{1,0:T(8,128)(2,1)} all-reduce(%x), channel_id=1, replica_groups=mesh['a'=2,'b'=8] {'b'}, to_apply=%add
  ROOT %tuple = (s32[], bf16[4,8]) tuple(%i, %psum.1)
}

%cond.2 (p: (s32[], bf16[4,8])) -> pred[] {
  %constant.3 = s32[]{:T(128)} constant(32)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  ROOT %lt.4 = pred[]{:T(512)} compare(%i, %constant.3), direction=LT, metadata={op_name="jit(step)/while/cond/lt"}
}

ENTRY %main.4 (p0: bf16[4,8]) -> f32[4,64] {
  %moved = (bf16[4,8]{1,0:T(8,128)(2,1)S(1)}, bf16[4,8]{1,0:T(8,128)(2,1)S(1)}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%z), channel_id=7, source_target_pairs={{0,8},{1,9}}
  %psum.5 = f32[8]{0:T(128)S(1)} all-reduce(%y), channel_id=6, replica_groups=mesh['a'=2,'b'=8] {'a','b'}, to_apply=%add
  ROOT %while.1 = (s32[], bf16[4,8]) while(%init), condition=%cond.2, body=%body.1, metadata={op_name="jit(step)/while"}
}
"""  # noqa: E501


def test_a_tpu_loop_counts_to_the_limit_of_its_condition_and_groups_are_axes_of_a_mesh() -> None:
    assert collectives(TPU_LOOP) == {
        Collective("all-reduce", 32, 64, 8, False): 32,
        Collective("all-reduce", 8, 32, 16, False): 1,
        Collective("collective-permute", 32, 64, 0, False): 1,
    }


SCATTER = """\
HloModule jit_own

%all-reduce-scatter.clone.1 (input.3: bf16[4096,64]) -> bf16[2112,64] {
  %pad.445 = bf16[4224,64]{1,0:T(8,128)(2,1)} pad(%input.3, %constant.9280), padding=0_128x0_0
  %all-reduce.56 = bf16[4224,64]{1,0:T(8,128)(2,1)} all-reduce(%pad.445), channel_id=54, replica_groups={{0,2},{1,3}}, to_apply=%add
  ROOT %slice = bf16[2112,64]{1,0:T(8,128)(2,1)} dynamic-slice(%all-reduce.56, %i, %zero), dynamic_slice_sizes={2112,64}
}

ENTRY %main.4 (p0: bf16[4096,64]) -> bf16[2112,64] {
  ROOT %fusion.290 = bf16[2112,64]{1,0:T(8,128)(2,1)} fusion(%p0), kind=kCustom, calls=%all-reduce-scatter.clone.1
}
"""  # noqa: E501


def test_a_tpus_sum_of_which_a_part_stays_is_a_reduce_scatter() -> None:
    (found,) = collectives(SCATTER)
    assert found == Collective("reduce-scatter", 2112 * 64, 2112 * 64 * 2, 2, False)
    # Half of the padded rows go to the other.
    assert found.moved_bytes == 2112 * 64 * 2


@pytest.mark.parametrize(
    ("operation", "num_bytes", "moved"),
    # A ring of four: a sum goes round twice in quarters, less the own one; a gather once.
    [("all-reduce", 1000, 1500), ("all-gather", 1000, 750), ("reduce-scatter", 250, 750)],
)
def test_what_a_device_sends_in_a_ring(operation: str, num_bytes: int, moved: float) -> None:
    assert Collective(operation, 1, num_bytes, 4, False).moved_bytes == moved
