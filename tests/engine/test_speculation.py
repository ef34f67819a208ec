"""Verified drafts change no token, no log-probability and no end, whoever drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jaxserve.engine.engine import DeviceEngine
from jaxserve.engine.step import PlanFormat
from jaxserve.loop import HostLoop
from jaxserve.outputs import RequestOutput
from jaxserve.plan import SamplingParams, SequencePlan, SlotLoad, StepPlan, StepShape
from jaxserve.scheduling import CacheIdentity
from jaxserve.speculation import Drafter, EngineDrafter, NgramDrafter, Speculation
from tests.drafters import foreseeing
from tests.engine.models import serve, small_engine
from tests.oracle.tiny_models import write_tiny_model
from tests.policies import UNFORESEEN
from tests.remainder_grammars import RemainderGrammars, gated

Case = tuple[list[int], SamplingParams]
MAX_DRAFTS = 5


def cases() -> list[Case]:
    """Greedy and seeded, with all that a draft's row must see as if the drafts before it were known."""
    penalised = SamplingParams(
        temperature=0, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4
    )
    every = [
        SamplingParams(temperature=0),
        penalised,
        SamplingParams(temperature=0.9, seed=3),
        replace(penalised, temperature=1.3, seed=4, top_k=20, top_p=0.9, min_p=0.01),
        SamplingParams(temperature=0.7, seed=5, n=3, logit_bias={7: 2.0, 9: -50.0}),
        SamplingParams(
            seed=6,
            n=4,
            stop_token_ids=list(range(40, 60)),
            allowed_token_ids=list(range(30, 60)),
            min_tokens=6,
        ),
        SamplingParams(temperature=0.8, seed=7, allowed_token_ids=list(range(20, 90))),
        SamplingParams(temperature=0, prompt_logprobs=1),
    ]
    rng = np.random.default_rng(0)
    period = rng.integers(3, 90, 7).tolist()
    return [
        (
            (period * 6 + rng.integers(3, 90, 5).tolist())[number : 12 + 5 * number],
            replace(params, max_tokens=25 + number, ignore_eos=True, logprobs=2),
        )
        for number, params in enumerate(every)
    ]


@pytest.fixture(scope="module", params=["qwen3", "gemma3"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> DeviceEngine:
    folder: Path = write_tiny_model(request.param, tmp_path_factory.mktemp(request.param))
    return small_engine(folder, deterministic=True, chunk_rows=(16, 64), max_drafts=MAX_DRAFTS)


@pytest.fixture(scope="module")
def expected(engine: DeviceEngine) -> list[RequestOutput]:
    return serve(HostLoop(engine, overlap=False), cases())


@pytest.fixture(params=["foreseeing", "ngram"])
def drafter(request: pytest.FixtureRequest, expected: list[RequestOutput]) -> Callable[[], Drafter]:
    if request.param == "ngram":
        return lambda: NgramDrafter(1, 3)
    texts = [
        prompt + list(sample.token_ids)
        for (prompt, _), output in zip(cases(), expected, strict=True)
        for sample in output.outputs
    ]
    return foreseeing(texts, 90)


def facts(outputs: list[RequestOutput]) -> Iterator[tuple[object, ...]]:
    for output in outputs:
        yield (
            output.prompt_logprobs,
            *(
                (sample.token_ids, sample.finish_reason, sample.stop_reason, sample.logprobs)
                for sample in output.outputs
            ),
        )


@pytest.mark.parametrize("together", [True, False], ids=["together", "alone"])
@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
def test_drafts_change_nothing_to_the_bit(
    engine: DeviceEngine,
    expected: list[RequestOutput],
    drafter: Callable[[], Drafter],
    overlap: bool,
    together: bool,
) -> None:
    loop = HostLoop(
        engine,
        overlap=overlap,
        cache=CacheIdentity(model="tiny", kv_format="float32"),
        speculation=Speculation(drafter=drafter, max_drafts=MAX_DRAFTS, adaptive=False),
    )
    assert list(facts(serve(loop, cases(), together))) == list(facts(expected))
    drafted = loop.snapshot().speculation
    assert drafted is not None
    assert 0 < drafted.num_accepted < drafted.num_drafted
    assert engine.compiles_after_ready == 0


@pytest.mark.parametrize("together", [True, False], ids=["together", "alone"])
def test_drafts_from_answers_before_change_nothing_to_the_bit(
    engine: DeviceEngine, expected: list[RequestOutput], together: bool
) -> None:
    speculation = Speculation(drafter=NgramDrafter, max_drafts=MAX_DRAFTS, adaptive=False, shared_tokens=5000)
    loop = HostLoop(engine, speculation=speculation)
    accepted = [0]
    for _ in range(2):
        assert list(facts(serve(loop, cases(), together))) == list(facts(expected))
        drafted = loop.snapshot().speculation
        assert drafted is not None
        accepted.append(drafted.num_accepted - accepted[-1])
    # Asked again, most is known; where samples of one prompt part, it is guessed which of them this one is.
    num_tokens = sum(len(sample.token_ids) for output in expected for sample in output.outputs)
    assert accepted[1] < num_tokens / 4 < num_tokens / 2 < accepted[2]


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
def test_drafts_of_answers_held_to_a_grammar_change_nothing(engine: DeviceEngine, overlap: bool) -> None:
    limits = engine.limits
    grammars = RemainderGrammars(limits.vocab_size, limits.eos_token_ids[0])
    every = [
        gated(18, max_tokens=30, temperature=0, logprobs=2),
        gated(40, max_tokens=25, seed=4, n=3, repetition_penalty=1.4, frequency_penalty=0.5),
        SamplingParams(max_tokens=30, temperature=0.9, seed=2, ignore_eos=True),
        gated(15, max_tokens=30, seed=5, min_tokens=15, allowed_token_ids=list(range(1, 80)), top_k=9),
    ]
    requests = [(list(range(7 + number, 30, 2)), params) for number, params in enumerate(every)]
    plain = serve(HostLoop(engine, overlap=False, grammars=grammars), requests)
    texts = [p + list(s.token_ids) for (p, _), o in zip(requests, plain, strict=True) for s in o.outputs]
    speculation = Speculation(drafter=foreseeing(texts, 90), max_drafts=MAX_DRAFTS, adaptive=False)
    outputs = serve(HostLoop(engine, overlap=overlap, grammars=grammars, speculation=speculation), requests)
    assert list(facts(outputs)) == list(facts(plain))
    assert all(output.drafts.num_accepted > 0 for output in outputs)
    assert [output.outputs[0].finish_reason for output in outputs] == ["stop", "length", "length", "stop"]
    assert engine.compiles_after_ready == 0


def test_a_grammar_leaves_its_slot_with_the_answer(engine: DeviceEngine) -> None:
    """Whoever has the slot next, and an own set of tokens, drafts as if nobody had been there."""
    grammars = RemainderGrammars(engine.limits.vocab_size, engine.limits.eos_token_ids[0])
    held = (list(range(7, 30, 2)), gated(18, max_tokens=30, temperature=0))
    free = (
        list(range(9, 40, 3)),
        SamplingParams(temperature=0, max_tokens=30, bad_token_ids=(2,), ignore_eos=True),
    )
    (plain,) = serve(HostLoop(engine), [free])
    texts: list[list[int]] = []
    loop = HostLoop(
        engine,
        grammars=grammars,
        speculation=Speculation(drafter=foreseeing(texts, 90), max_drafts=MAX_DRAFTS, adaptive=False),
    )
    (gone,) = serve(HostLoop(engine, grammars=grammars), [held])
    texts += [held[0] + list(gone.outputs[0].token_ids), free[0] + list(plain.outputs[0].token_ids)]
    for _ in range(2):  # One after another in the one slot that is taken first.
        serve(loop, [held])
        (drafted,) = serve(loop, [free])
        assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids
        assert drafted.drafts.num_accepted > 0


def test_drafts_in_steps_of_their_own_shapes(tmp_path: Path) -> None:
    """Where shapes round differently the tokens are the same, as float32 has margin enough."""
    folder = write_tiny_model("qwen3", tmp_path)
    engine = small_engine(folder, max_drafts=MAX_DRAFTS, chunk_rows=(8, 64))
    plain = serve(HostLoop(engine), cases())
    texts = [p + list(s.token_ids) for (p, _), o in zip(cases(), plain, strict=True) for s in o.outputs]
    speculation = Speculation(drafter=foreseeing(texts, 90), max_drafts=MAX_DRAFTS, adaptive=False)
    outputs = serve(HostLoop(engine, speculation=speculation), cases())
    for one, other in zip(plain, outputs, strict=True):
        for ours, theirs in zip(one.outputs, other.outputs, strict=True):
            assert ours.token_ids == theirs.token_ids
            assert ours.cumulative_logprob == pytest.approx(theirs.cumulative_logprob, abs=1e-3)
    assert engine.compiles_after_ready == 0


def test_drafts_are_accepted_while_they_agree(engine: DeviceEngine, expected: list[RequestOutput]) -> None:
    """One step by hand: the right drafts, then a wrong one, then right ones that come too late."""
    (prompt, params), answer = cases()[0], list(expected[0].outputs[0].token_ids)
    engine.load_slot(
        SlotLoad(1, prompt, len(prompt), 0, ((5, 6, 7),) * len(engine.limits.windows), params, 0, 0)
    )
    run = [SequencePlan(1, len(prompt))]
    shape = engine.limits.fit(len(prompt), 1, 1, False)
    assert engine.collect(engine.dispatch(StepPlan.of(run, (), shape))).tokens.tolist() == answer[:1]
    for drafts, tokens in [
        ([*answer[1:3], 2, *answer[4:6]], [*answer[1:4], -1, -1, -1]),
        (answer[4:6], answer[4:7]),
        ([2], [answer[7], -1]),
        ([], [answer[8]]),
    ]:
        rows = len(drafts) + 1
        plan = StepPlan.of([SequencePlan(1, rows, rows)], (), engine.limits.fit(rows, 1, rows, False))
        plan = replace(plan, drafts=np.array([-1, *drafts], np.int32))
        assert engine.collect(engine.dispatch(plan)).tokens.tolist() == tokens


@pytest.mark.parametrize(
    ("family", "num_layers", "kv_format"), [("qwen3", 1, "float32"), ("gemma3", 5, "int8")]
)
def test_drafts_by_the_first_layers_change_nothing_to_the_bit(
    family: str, num_layers: int, kv_format: str, tmp_path: Path
) -> None:
    """Alone, in batches, with prefixes kept and pages so few that some are preempted."""
    engine = small_engine(
        write_tiny_model(family, tmp_path),
        deterministic=True,
        chunk_rows=(16, 64),
        max_drafts=3,
        draft_layers=num_layers,
        kv_format=kv_format,
        num_pages=14,
    )
    requests = cases() * 2
    plain = serve(HostLoop(engine, overlap=False), requests, together=False)
    loop = HostLoop(
        engine,
        max_chunk=24,
        policy=UNFORESEEN,
        cache=CacheIdentity(model="tiny", kv_format=kv_format),
        speculation=Speculation(drafter=EngineDrafter, max_drafts=3, adaptive=False, name="skip"),
    )
    outputs = serve(loop, requests)
    assert list(facts(outputs)) == list(facts(plain))
    if family == "qwen3":  # The other's windows give pages back.
        assert sum(output.metrics.num_preemptions for output in outputs) > 0
    drafted = loop.snapshot().speculation
    assert drafted is not None
    assert 0 < drafted.num_accepted < drafted.num_drafted
    assert engine.compiles_after_ready == 0


def test_an_engine_that_does_not_draft_is_not_asked_to(engine: DeviceEngine) -> None:
    speculation = Speculation(drafter=EngineDrafter, max_drafts=2, name="skip:3")
    with pytest.raises(ValueError, match="speculation 'skip:3': the engine does not draft itself"):
        HostLoop(engine, speculation=speculation)


def test_a_shape_without_drafts_takes_none() -> None:
    form = PlanFormat(StepShape(4, 4, 4), num_groups=1, num_slots=4, page_size=16)
    plan = replace(StepPlan.of([SequencePlan(0, 2, 2)], (), form.shape), drafts=np.array([-1, 4], np.int32))
    with pytest.raises(ValueError, match="which was compiled without"):
        form.pack(plan)
    assert (replace(form, max_drafts=1).pack(plan)[-4:] == [-1, 4, -1, -1]).all()


def test_more_drafts_than_an_engine_verifies_are_refused(engine: DeviceEngine) -> None:
    speculation = Speculation(drafter=NgramDrafter, max_drafts=MAX_DRAFTS + 1)
    with pytest.raises(ValueError, match="max_drafts 6: the engine verifies at most 5"):
        HostLoop(engine, speculation=speculation)
