"""Drafting in the host loop: what is counted, where it pays, and how answers end in the middle of a draft."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from jaxserve.loop import HostLoop
from jaxserve.outputs import RequestOutput
from jaxserve.plan import EngineLimits, SamplingParams, StepHandle, StepPlan, StepResult, StepShape
from jaxserve.speculation import Drafter, Speculation
from tests.drafters import foreseeing
from tests.fake_engine import FakeEngine
from tests.fake_limits import make_limits
from tests.fake_sequence import expected_answer

LIMITS = make_limits(num_slots=4, max_model_len=512, num_pages=(600,), max_drafts=4)
ENDLESS = SamplingParams(max_tokens=400, ignore_eos=True, seed=1)


class TimedEngine(FakeEngine):
    """Steps take as long as they are told to, by their rows; one that begins when nothing is in flight takes
    a `gap` longer."""

    def __init__(self, limits: EngineLimits, seconds: Callable[[int], float], gap: float = 0.0) -> None:
        super().__init__(limits)
        self.now = 0.0
        self._seconds = seconds
        self._gap = gap

    def dispatch(self, plan: StepPlan) -> StepHandle:
        if len(self.plans) == self.num_collected:
            self.now += self._gap
        return super().dispatch(plan)

    def collect(self, handle: StepHandle) -> StepResult:
        self.now += self._seconds(handle.plan.num_rows)
        return super().collect(handle)


class Knowing:
    """Drafts the answer itself, as far as is asked."""

    grade = 0

    def __init__(self, text: Sequence[int]) -> None:
        self._text = text
        self._num_told = 0

    def propose(self, tokens: Sequence[int], max_tokens: int) -> list[int]:
        self._num_told += len(tokens)
        return list(self._text[self._num_told : self._num_told + max_tokens])


def answer_of(prompt: list[int], params: SamplingParams) -> list[int]:
    return expected_answer(LIMITS, prompt, params, params.seed or 0)[0]


def run(
    engine: TimedEngine,
    drafter: Callable[[], Drafter] | None,
    requests: Sequence[tuple[list[int], SamplingParams]],
    *,
    adaptive: bool = True,
) -> tuple[HostLoop, dict[str, RequestOutput]]:
    speculation = None if drafter is None else Speculation(drafter=drafter, max_drafts=4, adaptive=adaptive)
    loop = HostLoop(engine, clock=lambda: engine.now, speculation=speculation)
    for number, (prompt, params) in enumerate(requests):
        loop.add(str(number), prompt, params)
    outputs = {delta.request_id: delta.output for delta in loop.run_until_idle() if delta.output}
    loop.check_integrity()
    return loop, outputs


def seconds_taken(
    seconds: Callable[[int], float],
    drafter: Callable[[], Drafter] | None,
    num_requests: int = 1,
    gap: float = 0.0,
) -> float:
    engine = TimedEngine(LIMITS, seconds, gap)
    requests = [([7 + number, 8, 9], ENDLESS) for number in range(num_requests)]
    _, outputs = run(engine, drafter, requests)
    for number, (prompt, params) in enumerate(requests):
        assert outputs[str(number)].outputs[0].token_ids == answer_of(prompt, params)
    return engine.now


def test_what_is_drafted_and_accepted_is_counted() -> None:
    prompt, params = [5, 6, 7], SamplingParams(max_tokens=22, ignore_eos=True, seed=3)
    text = prompt + answer_of(prompt, params)
    engine = TimedEngine(LIMITS, lambda rows: 1.0)
    loop, _ = run(engine, lambda: Knowing(text), [(prompt, params)], adaptive=False)
    # The first token comes with the prompt, then there are four times five, then one that nothing follows.
    assert [plan.num_rows for plan in engine.plans] == [3, 5, 5, 5, 5, 1]
    snapshot = loop.snapshot()
    assert (snapshot.num_steps, snapshot.num_sampled, snapshot.num_step_rows) == (6, 22, 24)
    assert snapshot.speculation is not None
    assert (snapshot.speculation.num_verifications, snapshot.speculation.num_drafted) == (4, 16)
    assert snapshot.speculation.num_accepted == 16
    assert HostLoop(FakeEngine(LIMITS)).snapshot().speculation is None


def test_drafted_steps_are_weighed_against_plain_ones() -> None:
    texts = [[7, 8, 9, *answer_of([7, 8, 9], ENDLESS)]]
    loop, _ = run(TimedEngine(LIMITS, lambda rows: 1.0), foreseeing(texts, 97), [([7, 8, 9], ENDLESS)])
    drafted = loop.snapshot().speculation
    assert drafted is not None
    # A plain step brings a token, and takes as long as one that brings the drafts that are accepted too.
    assert drafted.plain_seconds == pytest.approx(drafted.drafted_seconds + drafted.num_accepted)
    assert drafted.drafted_seconds >= drafted.num_verifications
    assert drafted.num_accepted > 0

    slower = TimedEngine(LIMITS, lambda rows: 1.0 + 0.1 * rows)
    loop, _ = run(slower, foreseeing([], 97), [([7, 8, 9], ENDLESS)])
    wrong = loop.snapshot().speculation
    assert wrong is not None
    assert wrong.num_verifications > 0
    assert 0 < wrong.plain_seconds < wrong.drafted_seconds


def test_an_answer_ends_in_the_middle_of_a_draft() -> None:
    prompt = [5, 6, 7]
    answer = answer_of(prompt, ENDLESS)
    stop = next(token for token in answer[2:5] if answer.index(token) in (2, 3, 4))
    num_tokens = answer.index(stop) + 1
    engine = TimedEngine(LIMITS, lambda rows: 1.0)
    params = SamplingParams(max_tokens=400, ignore_eos=True, seed=1, stop_token_ids=[stop])
    loop, outputs = run(engine, lambda: Knowing(prompt + answer), [(prompt, params)], adaptive=False)
    (sample,) = outputs["0"].outputs
    assert (sample.token_ids, sample.stop_reason) == (answer[:num_tokens], stop)
    assert len(engine.plans) == 2
    assert loop.snapshot().num_sampled == num_tokens


def test_rows_that_cost_nothing_are_used() -> None:
    texts = [[7 + n, 8, 9, *answer_of([7 + n, 8, 9], ENDLESS)] for n in range(3)]
    for num_requests in (1, 3):
        plain = seconds_taken(lambda rows: 1.0, None, num_requests)
        drafting = seconds_taken(lambda rows: 1.0, foreseeing(texts, 97), num_requests)
        assert plain / drafting > 1.8


@pytest.mark.parametrize("num_requests", [1, 4])
@pytest.mark.parametrize("gap", [0.0, 0.08])
@pytest.mark.parametrize("price", [0.02, 0.1, 1.0])
def test_where_drafting_does_not_pay_it_costs_little(price: float, gap: float, num_requests: int) -> None:
    def seconds(rows: int) -> float:
        return 1.0 + price * rows

    plain = seconds_taken(seconds, None, num_requests, gap)
    assert seconds_taken(seconds, lambda: Knowing(()), num_requests, gap) < 1.03 * plain
    assert seconds_taken(seconds, foreseeing([], 97), num_requests, gap) < 1.03 * plain
    if price == 1.0:  # Even right guesses do not pay then.
        texts = [[7 + n, 8, 9, *answer_of([7 + n, 8, 9], ENDLESS)] for n in range(num_requests)]
        assert seconds_taken(seconds, foreseeing(texts, 97), num_requests, gap) < 1.03 * plain


@pytest.mark.parametrize("num_requests", [1, 4, 16])
def test_to_find_out_that_it_does_not_pay_costs_little(num_requests: int) -> None:
    """Answers of 96 tokens, and steps that take as long as those of a small model on two cores do."""
    limits = make_limits(num_slots=num_requests, max_model_len=512, num_pages=(3000,), max_drafts=7)
    rungs = (2, 4, 8, 16, 32, 64, 128, 256)
    shapes = [StepShape(rows, min(rows, num_requests), max(16, 2 * num_requests)) for rows in rungs]
    limits = replace(limits, chunk_shapes=tuple(shapes))
    params = SamplingParams(max_tokens=96, ignore_eos=True, seed=1)
    requests = [([7 + number, *range(3, 30)], params) for number in range(num_requests)]

    def taken(drafter: Callable[[], Drafter] | None) -> float:
        engine = TimedEngine(limits, lambda rows: 7.5 + 0.4 * rows, gap=1.4 + 0.1 * num_requests)
        run(engine, drafter, requests)
        return engine.now

    assert taken(foreseeing([], 97)) < 1.03 * taken(None)


def test_the_time_saved_is_that_of_the_plain_steps_spared() -> None:
    prompt = [7, 8, 9]
    text = prompt + answer_of(prompt, ENDLESS)
    times = {1: 1.0, 5: 1.5}
    engine = TimedEngine(LIMITS, lambda rows: times.get(rows, 1.2))
    loop, outputs = run(engine, lambda: Knowing(text), [(prompt, ENDLESS)])
    drafts, standing = outputs["0"].drafts, loop.snapshot().speculation
    assert standing is not None
    assert standing.state == "drafting"
    # All 400 tokens but the first would have come with plain steps of 1.0 each.
    assert drafts.seconds_saved == pytest.approx(399.0 - (engine.now - 1.2))
    assert standing.seconds_saved == pytest.approx(drafts.seconds_saved)
    assert drafts.num_drafted == drafts.num_accepted == standing.num_drafted > 250
    assert drafts.accepted_length == standing.accepted_length > 4.0


def test_samples_share_a_record_of_their_drafts() -> None:
    prompt, params = [5, 6, 7], SamplingParams(n=3, max_tokens=40, ignore_eos=True, seed=3)
    texts = [prompt + expected_answer(LIMITS, prompt, params, 3, index)[0] for index in range(3)]
    loop, outputs = run(
        TimedEngine(LIMITS, lambda rows: 1.0), foreseeing(texts, 97), [(prompt, params)], adaptive=False
    )
    drafts, standing = outputs["0"].drafts, loop.snapshot().speculation
    assert standing is not None
    counts = (drafts.num_verifications, drafts.num_drafted, drafts.num_accepted)
    assert counts == (standing.num_verifications, standing.num_drafted, standing.num_accepted)
    assert drafts.num_accepted > 0


@pytest.mark.parametrize(
    ("drafter", "state"),
    [(lambda: Knowing(()), "no_drafts"), (foreseeing([], 97), "does_not_pay")],
    ids=["no drafts", "wrong ones"],
)
def test_why_drafting_rests_is_said(drafter: Callable[[], Drafter], state: str) -> None:
    engine = TimedEngine(LIMITS, lambda rows: 1.0 + 0.3 * rows, gap=0.1)
    loop = HostLoop(
        engine, clock=lambda: engine.now, speculation=Speculation(drafter=drafter, max_drafts=4, name="x")
    )
    loop.add("a", [7, 8, 9], ENDLESS)
    seen: list[str] = []
    for _ in loop.run_until_idle():
        standing = loop.snapshot().speculation
        assert standing is not None
        seen.append(standing.state)
    assert standing.drafter == "x"
    assert standing.seconds_saved < 0.0
    assert set(seen) == {"measuring", "drafting", state}


def test_steps_overlap_while_nothing_is_drafted() -> None:
    class Watching(TimedEngine):
        most = 0

        def dispatch(self, plan: StepPlan) -> StepHandle:
            handle = super().dispatch(plan)
            self.most = max(self.most, len(self.plans) - self.num_collected)
            return handle

    engine = Watching(LIMITS, float)
    run(engine, lambda: Knowing(()), [([7, 8, 9], ENDLESS)])
    assert engine.most == 2
    engine = Watching(LIMITS, lambda rows: 1.0)
    run(engine, lambda: Knowing(()), [([7, 8, 9], ENDLESS)], adaptive=False)
    assert engine.most == 1
