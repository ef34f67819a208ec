"""The fake engine must find the faults that it is there to find."""

from __future__ import annotations

from typing import Any

import pytest

from jaxserve.loop import HostLoop
from jaxserve.plan import PageGrant, SamplingParams, SequencePlan, SlotLoad, StepPlan
from jaxserve.scheduling import PagePool, PageTable
from tests.fake_engine import FakeEngine, FakeEngineError
from tests.fake_limits import make_limits
from tests.policies import UNFORESEEN

LIMITS = make_limits(num_slots=4, num_pages=(30,))


def load(slot: int, pages: tuple[int, ...], tokens: tuple[int, ...] = (3, 4, 5), **other: Any) -> SlotLoad:
    fields: dict[str, Any] = {"num_computed": 0, "params": SamplingParams(), "seed": 1, "sample_index": 0}
    return SlotLoad(
        slot=slot, tokens=tokens, num_prompt_tokens=len(tokens), pages=(pages,), **(fields | other)
    )


def plan(*sequences: SequencePlan, grants: tuple[PageGrant, ...] = ()) -> StepPlan:
    num_rows = sum(sequence.num_tokens for sequence in sequences)
    num_logit_rows = sum(sequence.num_logit_rows for sequence in sequences)
    shape = LIMITS.fit(num_rows, len(sequences), num_logit_rows, num_rows == len(sequences))
    return StepPlan.of(sequences, grants, shape)


def test_a_page_that_is_written_must_have_been_granted() -> None:
    engine = FakeEngine(LIMITS)
    engine.load_slot(load(0, ()))
    with pytest.raises(FakeEngineError, match="never granted"):
        engine.dispatch(plan(SequencePlan(0, 3)))


def test_the_sink_may_not_be_granted() -> None:
    engine = FakeEngine(LIMITS)
    engine.load_slot(load(0, ()))
    with pytest.raises(FakeEngineError, match="page 0"):
        engine.dispatch(plan(SequencePlan(0, 3), grants=(PageGrant(0, 0, 0, 0),)))


def test_overwriting_another_sequence_is_found_when_it_reads() -> None:
    engine = FakeEngine(LIMITS)
    engine.load_slot(load(0, (1,)))
    engine.collect(engine.dispatch(plan(SequencePlan(0, 3))))
    engine.load_slot(load(1, (1,), tokens=(8, 9)))
    engine.collect(engine.dispatch(plan(SequencePlan(1, 2))))
    with pytest.raises(FakeEngineError, match="does not hold the reader's position 0"):
        engine.dispatch(plan(SequencePlan(0, 1)))


def test_pages_of_a_step_in_flight_may_not_be_given_away() -> None:
    engine = FakeEngine(LIMITS)
    engine.load_slot(load(0, (1,)))
    engine.dispatch(plan(SequencePlan(0, 3)))
    with pytest.raises(FakeEngineError, match="in use by a step in flight"):
        engine.load_slot(load(1, (1,)))


def test_rows_beyond_the_known_tokens_are_refused() -> None:
    engine = FakeEngine(LIMITS)
    engine.load_slot(load(0, (1,)))
    with pytest.raises(FakeEngineError, match="4 rows of 3 uncomputed"):
        engine.dispatch(plan(SequencePlan(0, 4)))
    with pytest.raises(FakeEngineError, match="never filled"):
        engine.dispatch(plan(SequencePlan(2, 1)))


def serve_tiny_pool() -> None:
    limits = make_limits(num_slots=4, num_pages=(14,))
    loop = HostLoop(FakeEngine(limits), overlap=True, policy=UNFORESEEN)
    for number in range(8):
        params = SamplingParams(n=2, max_tokens=20, ignore_eos=True, seed=number)
        loop.add(str(number), [number] * 9, params)
    list(loop.run_until_idle())


def test_a_host_that_reuses_pages_too_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    serve_tiny_pool()
    monkeypatch.setattr(PagePool, "begin_step", lambda self: None)
    monkeypatch.setattr(PagePool, "retire_step", lambda self: None)
    with pytest.raises(FakeEngineError, match="in use by a step in flight"):
        serve_tiny_pool()


def test_a_host_that_loses_grants_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    grow = PageTable.grow
    monkeypatch.setattr(PageTable, "grow", lambda self, num_tokens: grow(self, num_tokens)[1:])
    with pytest.raises(FakeEngineError, match="never granted"):
        serve_tiny_pool()
