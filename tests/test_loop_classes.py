"""What priority classes do to requests that run: a floor of slots is made room for, and no answer changes."""

from __future__ import annotations

import pytest

from jaxserve.loop import HostLoop
from jaxserve.plan import SamplingParams
from jaxserve.scheduling import ServiceTerms
from tests.fake_engine import FakeEngine
from tests.fake_limits import make_limits
from tests.fake_sequence import expected_answer

LIMITS = make_limits(num_slots=4)
LONG = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
SHORT = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_floor_is_given_a_running_requests_slot_between_steps(overlap: bool) -> None:
    loop = HostLoop(FakeEngine(LIMITS), overlap=overlap)
    for number in range(8):
        terms = ServiceTerms(priority="batch")
        loop.add(f"batch-{number}", [5 + number] * 9, LONG, terms=terms)
    for _ in range(6):
        loop.step()
    assert loop.num_running == LIMITS.num_slots
    loop.add("urgent", [50, 51, 52], SHORT, terms=ServiceTerms(priority="interactive"))
    ended = [delta.output for delta in loop.run_until_idle() if delta.output is not None]
    assert ended[0].request_id == "urgent"
    assert loop.snapshot().num_preemptions == 1
    for output in ended:
        params = SHORT if output.request_id == "urgent" else LONG
        tokens, _, _ = expected_answer(LIMITS, output.prompt_token_ids, params, 0)
        assert output.outputs[0].token_ids == tokens
    assert len(ended) == 9
    loop.check_integrity()
