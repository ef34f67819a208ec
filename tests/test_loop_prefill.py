"""A loop whose prompts are computed on one engine and whose answers are decoded on another."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from jaxserve.loop import HostLoop
from jaxserve.outputs import RequestOutput
from jaxserve.plan import EngineLimits, SamplingParams
from jaxserve.prefill_side import PrefillSide
from jaxserve.scheduling import CacheIdentity, ServiceTerms
from tests.fake_engine import FakeEngine
from tests.fake_limits import make_limits
from tests.fake_prefill import FakePageLink, FakePrefill
from tests.fake_sequence import expected_answer
from tests.policies import UNFORESEEN

CACHE = CacheIdentity(model="fake", kv_format="fake")
LIMITS = make_limits(num_slots=4, num_pages=(41, 41), windows=(0, 6), max_model_len=96)
PAGE = LIMITS.page_size
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def text(number: int, length: int = 30) -> list[int]:
    return [(number * 13 + 7 * place) % 90 + 3 for place in range(length)]


class Served:
    """A loop with a prefill side, and what was asked of it."""

    def __init__(
        self, limits: EngineLimits = LIMITS, *, cache: CacheIdentity | None = CACHE, **own: Any
    ) -> None:
        self.limits = limits
        self.decoder = FakeEngine(limits)
        self.prefill = FakePrefill(self.decoder, cache=cache, **own)
        self.now = 0.0
        self.loop = HostLoop(
            self.decoder,
            cache=cache,
            prefills=self.prefill.side,
            policy=UNFORESEEN,
            clock=lambda: self.now,
        )
        self._asked: dict[str, tuple[list[int], SamplingParams]] = {}
        self.outputs: dict[str, RequestOutput] = {}

    def add(self, name: str, prompt: list[int], params: SamplingParams = GREEDY, **terms: Any) -> None:
        self.loop.add(name, prompt, params, terms=ServiceTerms(**terms))
        self._asked[name] = prompt, params

    def step(self) -> None:
        for delta in self.loop.step():
            if delta.output is not None:
                self.outputs[delta.request_id] = delta.output
        self.loop.check_integrity()

    def finish(self) -> dict[str, RequestOutput]:
        """Run until all has ended, check all answers, and see that nothing is held any more."""
        while not self.loop.idle:
            self.step()
        for name, (prompt, params) in self._asked.items():
            for index, answer in enumerate(self.outputs[name].outputs):
                expected = expected_answer(self.limits, prompt, params, self.outputs[name].seed, index)
                if answer.finish_reason in ("abort", "expired"):
                    assert answer.token_ids == expected[0][: len(answer.token_ids)]
                else:
                    assert (answer.token_ids, answer.finish_reason) == expected[:2]
        assert self.loop.num_running == 0
        assert set(self.outputs) == set(self._asked)
        return self.outputs

    @property
    def prefills(self) -> Any:
        return self.loop.snapshot().prefills


def test_prompts_are_computed_apart_and_steps_that_decode_have_no_more_than_a_row_each() -> None:
    served = Served()
    for number in range(4):
        served.add(str(number), text(number))
    served.finish()
    assert all(plan.shape.decode for plan in served.decoder.plans)
    assert served.prefills.num_prompts == 4
    assert set(served.prefills.num_local.values()) == {0}
    # Of 29 tokens 8 pages in one group; in the other those that the last token reads.
    assert [len(sources) for _, sources, _ in served.prefill.link.moved] == [8, 2] * 4
    assert served.prefills.num_pages == 40


@pytest.mark.parametrize("cache", [CACHE, None])
def test_sampled_answers_and_samples_of_one_prompt_are_as_ever(cache: CacheIdentity | None) -> None:
    served = Served(cache=cache)
    served.add("one", text(1), SamplingParams(seed=5, max_tokens=20))
    served.add("three", text(2), SamplingParams(seed=6, n=3, max_tokens=9))
    served.add("drawn", text(3), SamplingParams(max_tokens=9))
    served.finish()
    assert served.prefills.num_prompts == 3


def test_a_short_prompt_and_one_whose_logits_are_wanted_are_computed_where_they_decode() -> None:
    served = Served()
    served.add("short", text(1, PAGE))
    served.add("scored", text(2), dataclasses.replace(GREEDY, prompt_logprobs=0))
    outputs = served.finish()
    assert not served.prefill.engine.plans
    assert len(outputs["scored"].prompt_logprobs or ()) == 30
    assert set(served.prefills.num_local.values()) == {0}, "there was no choice"


def test_answers_go_on_while_a_prompt_is_computed() -> None:
    served = Served()
    served.add("first", text(1), dataclasses.replace(GREEDY, max_tokens=30))
    while not served.loop.num_running:
        served.step()
    served.prefill.engine.steps_done = 0
    served.add("second", text(2))
    before = served.loop.snapshot().num_sampled
    for _ in range(10):
        served.step()
    assert served.loop.snapshot().num_sampled - before >= 9
    assert served.loop.num_running == 1
    assert served.prefills.num_open == 1
    served.prefill.engine.steps_done = 1 << 30
    served.finish()
    assert served.prefills.num_prompts == 2


def test_a_prompt_goes_where_there_is_room_if_all_slots_are_taken() -> None:
    served = Served(num_slots=1)
    served.prefill.engine.steps_done = 0
    for number in range(3):
        served.add(str(number), text(number))
    served.step()
    assert served.loop.num_running == 2, "they wait for nobody"
    served.finish()
    assert served.prefills.num_prompts == 1
    assert served.prefills.num_local == {"slots": 2, "pages": 0, "order": 0}


def test_a_prompt_goes_where_there_is_room_if_pages_are_few() -> None:
    served = Served(num_pages=(12, 12))
    served.add("small", text(1, 20))
    served.add("large", text(2, 80))
    served.add("last", text(3, 30))
    served.finish()
    assert served.prefills.num_local["pages"] == 2
    assert served.prefills.num_prompts == 1
    served.add("again", text(3, 30))
    served.add("other", text(4, 30))
    served.finish()
    assert served.prefills.num_prompts == 2, "what is cached there gives way"


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4, 8])
def test_a_request_may_end_wherever_it_is(steps: int) -> None:
    served = Served(num_slots=2)
    for number in range(4):
        served.add(str(number), text(number))
    served.add("late", text(9), deadline=5.0)
    for _ in range(steps):
        served.step()
    for number in range(3):
        if str(number) not in served.outputs:
            assert served.loop.abort(str(number))
    served.now = 6.0
    outputs = served.finish()
    assert outputs["3"].outputs[0].finish_reason == "length"


def test_a_request_that_is_lent_keeps_its_deadline() -> None:
    served = Served()
    served.prefill.engine.steps_done = 0
    served.add("busy", text(1, 3), dataclasses.replace(GREEDY, max_tokens=30))
    served.add("late", text(2), deadline=5.0)
    served.step()
    assert served.prefills.num_open == 1
    assert served.loop.snapshot().num_waiting == 1
    served.now = 6.0
    served.step()
    assert served.outputs["late"].outputs[0].finish_reason == "expired"
    served.finish()


def test_preempted_requests_are_computed_again_apart() -> None:
    limits = dataclasses.replace(LIMITS, num_pages=(21, 21))
    served = Served(limits, cache=None)
    for number in range(4):
        served.add(str(number), text(number, 20), dataclasses.replace(GREEDY, max_tokens=40))
    served.finish()
    assert served.loop.snapshot().num_preemptions
    assert served.prefills.num_prompts > 4


def test_a_full_pool_of_answers_keeps_computed_prompts_waiting_and_loses_none() -> None:
    limits = dataclasses.replace(LIMITS, num_pages=(14, 14))
    served = Served(limits, num_pages=(41, 41))
    for number in range(6):
        served.add(str(number), text(number), dataclasses.replace(GREEDY, max_tokens=16))
    most = 0
    while not served.loop.idle:
        served.step()
        most = max(most, served.prefills.num_open)
    served.finish()
    assert most >= 3
    assert served.prefills.num_prompts >= 4


def test_prefixes_are_found_on_both_sides_and_only_what_is_missing_is_moved() -> None:
    served = Served(dataclasses.replace(LIMITS, num_pages=(41,), windows=(0,)))
    shared = text(1, 40)
    served.add("first", shared + text(2, 9))
    served.finish()
    served.prefill.link.moved.clear()
    served.add("second", shared + text(3, 9))
    outputs = served.finish()
    assert outputs["second"].num_cached_tokens == 40
    assert [len(sources) for _, sources, _ in served.prefill.link.moved] == [2]
    computed = sum(plan.num_rows for plan in served.prefill.engine.plans)
    assert computed == 48 + 8
    served.add("third", shared + text(2, 9))
    served.finish()
    assert served.prefills.num_prompts == 2, "all of it is where it decodes"


def test_prompts_are_found_by_nobody_else_and_by_nobody_after_they_were_cleared() -> None:
    served = Served()
    served.add("a", text(1), tenant="a")
    served.finish()
    served.add("b", text(1), tenant="b")
    assert served.finish()["b"].num_cached_tokens == 0
    assert served.loop.clear_prefix_cache() > 0
    served.add("again", text(1), tenant="a")
    assert served.finish()["again"].num_cached_tokens == 0


def test_a_lost_device_of_the_prefill_side_ends_everything() -> None:
    served = Served(fail_at=1)
    for number in range(3):
        served.add(str(number), text(number, 90 - number), dataclasses.replace(GREEDY, max_tokens=6))
    with pytest.raises(RuntimeError, match="the device has gone"):
        served.finish()
    ends = [delta.finish_reason for delta in served.loop.take_deltas()]
    assert len(ends) + len(served.outputs) == 3
    assert set(ends) == {"error"}
    assert served.loop.num_open == 0
    served.loop.check_integrity()
    assert served.loop.idle


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_size": 8}, "page_size is 4 where prompts are computed and 8 where answers are decoded"),
        ({"windows": (0, 9)}, r"windows is \(0, 6\) where prompts are computed and \(0, 9\) where"),
        ({"num_replicas": 2}, "prompts are computed apart for one replica, not 2"),
    ],
)
def test_engines_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    one, other = FakeEngine(LIMITS), dataclasses.replace(LIMITS, **changes)
    with pytest.raises(ValueError, match=message):
        PrefillSide(one, FakePageLink(one, FakeEngine(LIMITS)), other)
