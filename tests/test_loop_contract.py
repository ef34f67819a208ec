"""The answer contract on a fake engine: no schedule changes a token or a finish reason."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from jaxserve.loop import HostLoop
from jaxserve.outputs import RequestOutput
from jaxserve.plan import SamplingParams
from jaxserve.scheduling import CacheIdentity
from jaxserve.speculation import Speculation
from tests.drafters import foreseeing
from tests.fake_limits import make_limits
from tests.fake_replicas import fake_engine
from tests.fake_sequence import expected_answer, logprob
from tests.policies import UNFORESEEN

Case = tuple[list[int], SamplingParams]


def mixed_cases(count: int = 36) -> list[Case]:
    rng = random.Random(7)
    cases: list[Case] = []
    for number in range(count):
        prompt = [rng.randrange(97) for _ in range(rng.choice([1, 2, 3, 4, 5, 8, 9, 17, 33, 50]))]
        max_tokens = rng.randint(1, 24)
        params = SamplingParams(
            n=rng.choice([1, 1, 1, 2, 4]),
            temperature=rng.choice([0.0, 0.7, 1.0]),
            max_tokens=max_tokens,
            min_tokens=rng.choice([0, 0, max_tokens // 2]),
            stop_token_ids=rng.sample(range(97), rng.choice([0, 3, 9])),
            ignore_eos=rng.random() < 0.3,
            allowed_token_ids=rng.choice([None, None, list(range(1, 40))]),
            seed=number * 31 - 400,
            logprobs=rng.choice([None, 0, 2]),
            prompt_logprobs=rng.choice([None, None, None, 1]),
        )
        cases.append((prompt, params))
    return cases


def serve(cases: list[Case], limits: Any, **options: Any) -> tuple[list[RequestOutput], Any]:
    engine = fake_engine(limits)
    if limits.max_drafts:
        options["speculation"] = Speculation(
            drafter=foreseeing(all_texts(cases, limits), limits.vocab_size),
            max_drafts=limits.max_drafts,
            adaptive=False,
        )
    loop = HostLoop(engine, **options)
    for number, (prompt, params) in enumerate(cases):
        loop.add(str(number), prompt, params)
    outputs: dict[str, RequestOutput] = {}
    streamed: dict[tuple[str, int], list[int]] = {}
    for delta in loop.run_until_idle():
        streamed.setdefault((delta.request_id, delta.index), []).extend(delta.token_ids)
        if delta.output is not None:
            assert delta.request_id not in outputs, "finished twice"
            outputs[delta.request_id] = delta.output
    loop.check_integrity()
    for output in outputs.values():
        for completion in output.outputs:
            assert streamed[output.request_id, completion.index] == completion.token_ids
    return [outputs[str(number)] for number in range(len(cases))], engine


def all_texts(cases: list[Case], limits: Any) -> list[list[int]]:
    """The prompt and the answer of every sample, by computation."""
    return [
        prompt + expected_answer(limits, prompt, params, params.seed or 0, index)[0]
        for prompt, params in cases
        for index in range(params.n)
    ]


def check_outputs(cases: list[Case], outputs: list[RequestOutput], limits: Any) -> None:
    for (prompt, params), output in zip(cases, outputs, strict=True):
        assert output.prompt_token_ids == prompt
        assert len(output.outputs) == params.n
        for index, completion in enumerate(output.outputs):
            expected = expected_answer(limits, prompt, params, params.seed or 0, index)
            assert (completion.token_ids, completion.finish_reason, completion.stop_reason) == expected
            if params.logprobs is not None:
                assert completion.logprobs is not None
                assert [next(iter(at)) for at in completion.logprobs] == completion.token_ids
        if params.prompt_logprobs is not None:
            assert output.prompt_logprobs is not None
            assert output.prompt_logprobs[0] is None
            assert [next(iter(at or ())) for at in output.prompt_logprobs[1:]] == prompt[1:]


LIMITS = make_limits(num_slots=8)
SCHEDULES = {
    "batched": (LIMITS, {}),
    "chunk 16": (LIMITS, {"max_chunk": 16}),
    "chunk 1": (LIMITS, {"max_chunk": 1}),
    "one small shape": (make_limits(num_slots=16, chunk_rows=(16,)), {}),
    "fewer rows than slots": (make_limits(num_slots=16, chunk_rows=(4,)), {}),
    "many slots": (make_limits(num_slots=64, num_pages=(2000,)), {}),
    "one slot": (make_limits(num_slots=1), {}),
    "tiny pool": (make_limits(num_slots=8, num_pages=(22,)), {"policy": UNFORESEEN}),
    "tiny pool, foreseen": (make_limits(num_slots=8, num_pages=(22,)), {}),
    "tiny pool, chunk 5": (make_limits(num_slots=8, num_pages=(22,)), {"max_chunk": 5, "policy": UNFORESEEN}),
    "windows": (make_limits(num_pages=(200, 120), windows=(0, 8)), {}),
    "windows, tiny pools": (make_limits(num_pages=(22, 5), windows=(0, 8)), {"policy": UNFORESEEN}),
    "windows alone": (make_limits(num_pages=(4, 9), windows=(7, 21)), {"max_chunk": 16}),
    "iterations": (make_limits(max_iterations=4), {}),
    "iterations, tiny pool": (
        make_limits(num_slots=8, num_pages=(24,), max_iterations=8),
        {"policy": UNFORESEEN},
    ),
    "iterations, windows": (make_limits(num_pages=(200, 120), windows=(0, 8), max_iterations=3), {}),
    "page of one token": (make_limits(page_size=1, num_pages=(80, 30), windows=(0, 5)), {}),
    "drafts": (make_limits(max_drafts=4), {}),
    "drafts, one slot": (make_limits(num_slots=1, max_drafts=7), {}),
    "drafts, fewer rows than slots": (make_limits(num_slots=16, chunk_rows=(4,), max_drafts=2), {}),
    "drafts, cached": (
        make_limits(num_slots=8, num_pages=(40,), max_drafts=4),
        {"cache": CacheIdentity(model="fake", kv_format="fake")},
    ),
    "drafts, tiny pool": (make_limits(num_slots=8, num_pages=(20,), max_drafts=3), {"policy": UNFORESEEN}),
    "drafts, tiny pool, chunk 5": (
        make_limits(num_slots=8, num_pages=(20,), max_drafts=9),
        {"max_chunk": 5, "policy": UNFORESEEN},
    ),
    "drafts, windows": (make_limits(num_pages=(200, 120), windows=(0, 8), max_drafts=6), {}),
    "drafts, page of one token": (
        make_limits(page_size=1, num_pages=(80, 30), windows=(0, 5), max_drafts=4),
        {},
    ),
    "drafts and iterations": (make_limits(num_slots=1, max_iterations=3, max_drafts=4), {}),
    "replicas": (make_limits(num_slots=8, num_replicas=2), {}),
    "three replicas of one slot": (make_limits(num_slots=3, num_replicas=3), {"max_chunk": 5}),
    "replicas, cached": (
        make_limits(num_slots=8, num_pages=(40,), num_replicas=2),
        {"cache": CacheIdentity(model="fake", kv_format="fake"), "max_chunk": 16},
    ),
    "replicas, tiny pools, chunk 5": (
        make_limits(num_slots=16, num_pages=(22,), num_replicas=2),
        {"max_chunk": 5, "policy": UNFORESEEN},
    ),
    "replicas, windows, tiny pools": (
        make_limits(num_slots=16, num_pages=(22, 5), windows=(0, 8), num_replicas=2),
        {"policy": UNFORESEEN},
    ),
    "replicas, iterations, tiny pools": (
        make_limits(num_slots=16, num_pages=(20,), max_iterations=8, num_replicas=2),
        {"policy": UNFORESEEN},
    ),
    "replicas, drafts": (make_limits(num_slots=6, max_drafts=4, num_replicas=3), {}),
    "replicas, drafts, tiny pools": (
        make_limits(num_slots=16, num_pages=(20,), max_drafts=3, num_replicas=2),
        {"policy": UNFORESEEN},
    ),
    "groups": (make_limits(num_slots=8, decode_groups=2), {}),
    "groups, chunk 5": (make_limits(num_slots=16, decode_groups=4), {"max_chunk": 5}),
    "more groups than slots": (make_limits(num_slots=3, decode_groups=4), {}),
    "groups, tiny pool": (make_limits(num_slots=8, num_pages=(22,), decode_groups=4), {"policy": UNFORESEEN}),
    "groups, windows, tiny pools": (
        make_limits(num_pages=(22, 5), windows=(0, 8), decode_groups=2),
        {"policy": UNFORESEEN},
    ),
    "groups, cached": (
        make_limits(num_slots=8, num_pages=(40,), decode_groups=2),
        {"cache": CacheIdentity(model="fake", kv_format="fake"), "max_chunk": 16},
    ),
    "groups, fewer rows than slots": (make_limits(num_slots=16, chunk_rows=(4,), decode_groups=2), {}),
    "replicas, groups, tiny pools": (
        make_limits(num_slots=16, num_pages=(18,), num_replicas=2, decode_groups=2),
        {"policy": UNFORESEEN, "max_chunk": 5},
    ),
    "replicas, fewer rows than slots": (make_limits(num_slots=16, chunk_rows=(4,), num_replicas=2), {}),
}


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_schedule_changes_an_answer(schedule: str, overlap: bool) -> None:
    limits, options = SCHEDULES[schedule]
    cases = mixed_cases()
    outputs, engine = serve(cases, limits, overlap=overlap, **options)
    check_outputs(cases, outputs, limits)
    iterated = any(plan.num_iterations > 1 for plan in engine.plans)
    assert iterated == (limits.max_iterations > 1)
    assert any(plan.drafts is not None for plan in engine.plans) == (limits.max_drafts > 0)
    ticks = [set(plan.slots.tolist()) if plan.shape.decode else set[int]() for plan in engine.plans]
    in_turn = [one and other and one.isdisjoint(other) for one, other in itertools.pairwise(ticks)]
    assert limits.decode_groups == 1 or sum(map(bool, in_turn)) > 10
    if options.get("policy") is UNFORESEEN:
        assert sum(output.metrics.num_preemptions for output in outputs) >= 5


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
def test_alone_as_in_a_batch(overlap: bool) -> None:
    for case in mixed_cases():
        outputs, _ = serve([case], LIMITS, overlap=overlap)
        check_outputs([case], outputs, LIMITS)


def test_logprobs_do_not_depend_on_the_schedule() -> None:
    cases = [(prompt, params) for prompt, params in mixed_cases(60) if params.prompt_logprobs is not None]
    limits, options = SCHEDULES["tiny pool, chunk 5"]
    alone = [serve([case], LIMITS, overlap=False)[0][0] for case in cases]
    together, _ = serve(cases * 2, limits, overlap=True, **options)
    for one, other in zip(alone * 2, together, strict=True):
        assert one.prompt_logprobs == other.prompt_logprobs
        assert [sample.logprobs for sample in one.outputs] == [sample.logprobs for sample in other.outputs]


def test_logprob_values_come_from_the_rows_they_belong_to() -> None:
    prompt, params = [5, 6, 7, 8, 9, 10], SamplingParams(logprobs=2, prompt_logprobs=3, max_tokens=4, seed=1)
    (output,), engine = serve([(prompt, params)], LIMITS)
    tokens = prompt + output.outputs[0].token_ids
    histories = engine._slots[0].histories
    at_prompt, at_answer = output.prompt_logprobs, output.outputs[0].logprobs
    assert at_prompt is not None
    assert at_answer is not None
    for position, entries in enumerate(at_prompt[1:] + list(at_answer)):
        assert entries is not None
        token = tokens[position + 1]
        assert entries[token].logprob == logprob(token, position, histories[position])
        num_top = 3 if position < len(prompt) - 1 else 2
        tops = [(histories[position] + i) % LIMITS.vocab_size for i in range(num_top)]
        assert list(entries) == [token, *(top for top in tops if top != token)]
        for place, top in enumerate(tops, start=1):
            assert entries[top].logprob == logprob(top, position, histories[position])
            assert top == token or entries[top].rank == place
    total = sum(entries[token].logprob for token, entries in zip(tokens[6:], at_answer, strict=True))
    assert output.outputs[0].cumulative_logprob == total


def test_samples_share_the_pages_of_their_prompt_and_copy_the_begun_one() -> None:
    limits = make_limits(num_slots=4, num_pages=(40,))
    for prompt_len, num_shared in [(13, 12), (12, 11), (4, 3), (5, 4)]:
        cases = [(list(range(10, 10 + prompt_len)), SamplingParams(n=4, seed=3, max_tokens=6))]
        outputs, engine = serve(cases, limits)
        check_outputs(cases, outputs, limits)
        assert [load.num_computed for load in engine.loads] == [0] + [num_shared] * 3
        shared = [load.pages[0][: num_shared // 4] for load in engine.loads]
        assert len(set(shared)) == 1


def test_prompt_logprobs_are_computed_once() -> None:
    limits = make_limits(num_slots=4, num_pages=(24,), max_model_len=80)
    prompt = list(range(40))
    cases = [
        ([1, 2, 3], SamplingParams(max_tokens=60, ignore_eos=True, seed=1)),
        (prompt, SamplingParams(n=3, prompt_logprobs=0, max_tokens=30, ignore_eos=True, seed=1)),
    ]
    outputs, engine = serve(cases, limits, policy=UNFORESEEN)
    check_outputs(cases, outputs, limits)
    assert outputs[1].metrics.num_preemptions > 0
    scored = sum(p.num_logit_rows for plan in engine.plans for p in plan.sequences if p.num_logit_rows > 1)
    assert len(prompt) - 1 <= scored <= len(prompt)
