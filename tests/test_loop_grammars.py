"""Answers held to a grammar, on a fake engine: the same tokens in every schedule, faults apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from jaxserve.loop import HostLoop
from jaxserve.outputs import RequestOutput
from jaxserve.plan import Grammar, SamplingParams
from jaxserve.speculation import Drafter, Speculation
from tests.drafters import foreseeing
from tests.fake_engine import FakeEngine
from tests.fake_limits import make_limits
from tests.fake_sequence import FakeSequence, expected_answer, sample
from tests.remainder_grammars import RemainderGrammars, gated

LIMITS = make_limits(num_slots=4)
EOS = LIMITS.eos_token_ids[0]
GRAMMARS = RemainderGrammars(LIMITS.vocab_size, EOS)


def expected(prompt: list[int], params: SamplingParams, sample_index: int = 0) -> list[int]:
    """The answer computed token by token."""
    assert params.grammar is not None
    matcher = GRAMMARS.compile(params.grammar).matcher(params, LIMITS.eos_token_ids)
    sequence = FakeSequence(list(prompt), len(prompt), 0, [], params, params.seed or 0, sample_index, (EOS,))
    while len(sequence.tokens) - len(prompt) < params.max_tokens:
        token = sample(sequence, len(sequence.tokens) - 1, LIMITS.vocab_size, matcher.allowed())
        sequence.append(token)
        if token == EOS:
            break
        matcher.accept(token)
    return sequence.tokens[len(prompt) :]


def answer_of(prompt: list[int], params: SamplingParams, sample_index: int = 0) -> list[int]:
    if params.grammar is not None:
        return expected(prompt, params, sample_index)
    return expected_answer(LIMITS, prompt, params, params.seed or 0, sample_index)[0]


def serve(
    cases: list[tuple[list[int], SamplingParams]],
    *,
    overlap: bool,
    num_pages: int = 257,
    drafter: Callable[[], Drafter] | None = None,
    decode_groups: int = 1,
) -> list[RequestOutput]:
    max_drafts = 4 if decode_groups == 1 else 0
    limits = make_limits(
        num_slots=4, num_pages=(num_pages,), max_drafts=max_drafts, decode_groups=decode_groups
    )
    speculation = drafter and Speculation(drafter=drafter, max_drafts=4, adaptive=False)
    loop = HostLoop(FakeEngine(limits), overlap=overlap, grammars=GRAMMARS, speculation=speculation)
    for number, (prompt, params) in enumerate(cases):
        loop.add(str(number), prompt, params)
    outputs = {d.request_id: d.output for d in loop.run_until_idle() if d.output is not None}
    loop.check_integrity()
    drafted = loop.snapshot().speculation
    assert drafted is None or drafted.num_accepted > 0
    return [outputs[str(number)] for number in range(len(cases))]


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
@pytest.mark.parametrize("num_pages", [257, 12], ids=["ample", "tiny pool"])
@pytest.mark.parametrize(
    ("drafts", "groups"), [(False, 1), (True, 1), (False, 3)], ids=["", "drafts", "groups"]
)
def test_gated_answers_are_the_same_in_every_schedule(
    overlap: bool, num_pages: int, drafts: bool, groups: int
) -> None:
    free = SamplingParams(max_tokens=30, seed=3, ignore_eos=True)
    cases = [
        ([5, 6, 7], gated(6, max_tokens=30, seed=1)),
        ([8] * 9, free),
        ([9] * 11, gated(12, max_tokens=30, seed=2, n=3)),
        ([4], gated(25, max_tokens=20, temperature=0)),
        ([5, 6], free),
    ]
    texts = [
        prompt + answer_of(prompt, params, index) for prompt, params in cases for index in range(params.n)
    ]
    drafter = foreseeing(texts, LIMITS.vocab_size) if drafts else None
    outputs = serve(cases, overlap=overlap, num_pages=num_pages, drafter=drafter, decode_groups=groups)
    if num_pages == 12:
        assert sum(output.metrics.num_preemptions for output in outputs) > 0
    for (prompt, params), output in zip(cases, outputs, strict=True):
        for answer in output.outputs:
            assert answer.token_ids == answer_of(prompt, params, answer.index)
        assert (output.drafts.num_accepted > 0) == drafts
    reasons = [output.outputs[0].finish_reason for output in outputs]
    assert reasons == ["stop", "length", "stop", "length", "length"]


@pytest.mark.parametrize("drafts", [False, True], ids=["", "drafts"])
def test_a_dead_end_ends_its_request_alone(drafts: bool) -> None:
    other = SamplingParams(max_tokens=20, seed=3, ignore_eos=True)
    blind = gated(-4, max_tokens=30, seed=1)
    # Drafts that go on beyond where the grammar does.
    texts = [[1, 2, *expected([1, 2], replace(blind, grammar=Grammar("regex", "30")))]]
    drafter = foreseeing([*texts, [3, *answer_of([3], other)]], LIMITS.vocab_size) if drafts else None
    dead, well = serve([([1, 2], blind), ([3], other)], overlap=True, drafter=drafter)
    (answer,) = dead.outputs
    assert (answer.finish_reason, answer.stop_reason) == ("error", "a dead end")
    assert len(answer.token_ids) == 4
    assert well.outputs[0].token_ids == expected_answer(LIMITS, [3], other, 3)[0]


def test_a_complete_text_that_no_token_can_end_ends_by_itself() -> None:
    (output,) = serve([([1, 2], gated(4, max_tokens=30, seed=1, ignore_eos=True))], overlap=True)
    assert len(output.outputs[0].token_ids) == 4
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", None)


def test_a_gated_request_that_is_aborted_leaves_nothing_behind() -> None:
    loop = HostLoop(FakeEngine(LIMITS), grammars=GRAMMARS)
    for name in "abc":
        loop.add(name, [1, 2, 3], gated(50, max_tokens=60, seed=1))
    for steps in range(12):
        if steps == 5:
            assert loop.abort("a")
        loop.step()
    assert loop.abort("b")
    assert loop.abort("c")
    list(loop.run_until_idle())
    loop.check_integrity()
    assert loop.num_running == 0


def test_a_loop_without_grammars_refuses_them() -> None:
    with pytest.raises(ValueError, match="grammar of kind regex: this engine was given no grammars"):
        HostLoop(FakeEngine(LIMITS)).add("a", [1], gated(3))


def test_a_malformed_grammar_is_refused_when_it_is_added() -> None:
    loop = HostLoop(FakeEngine(LIMITS), grammars=GRAMMARS)
    with pytest.raises(ValueError, match="invalid literal"):
        loop.add("a", [1], SamplingParams(grammar=Grammar("regex", "x")))
    assert loop.idle
