"""Drafting in the host loop: what is counted, where it pays, and how answers end in the middle of a draft."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from jaxserve.loop import HostLoop
from jaxserve.outputs import RequestOutput
from jaxserve.plan import EngineLimits, SamplingParams, StepHandle, StepPlan, StepResult
from jaxserve.speculation import Drafter, Speculation
from tests.drafters import foreseeing
from tests.fake_engine import FakeEngine, make_limits
from tests.fake_sequence import expected_answer

LIMITS = make_limits(num_slots=4, max_model_len=512, num_pages=(600,), max_drafts=4)
ENDLESS = SamplingParams(max_tokens=400, ignore_eos=True, seed=1)


class TimedEngine(FakeEngine):
    """Steps take as long as they are told to, by their rows."""

    def __init__(self, limits: EngineLimits, seconds: Callable[[int], float]) -> None:
        super().__init__(limits)
        self.now = 0.0
        self._seconds = seconds

    def collect(self, handle: StepHandle) -> StepResult:
        self.now += self._seconds(handle.plan.num_rows)
        return super().collect(handle)


class Knowing:
    """Drafts the answer itself, as far as is asked."""

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
    seconds: Callable[[int], float], drafter: Callable[[], Drafter] | None, num_requests: int = 1
) -> float:
    engine = TimedEngine(LIMITS, seconds)
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
    assert drafted.drafted_seconds == pytest.approx(drafted.num_verifications)
    assert drafted.plain_seconds == pytest.approx(drafted.num_verifications + drafted.num_accepted)
    assert drafted.num_accepted > 0

    loop, _ = run(TimedEngine(LIMITS, float), foreseeing([], 97), [([7, 8, 9], ENDLESS)])
    wrong = loop.snapshot().speculation
    assert wrong is not None
    assert wrong.num_accepted == 0
    assert wrong.plain_seconds == wrong.num_verifications < wrong.drafted_seconds


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


@pytest.mark.parametrize("num_requests", [1, 3])
def test_where_drafting_does_not_pay_it_costs_little(num_requests: int) -> None:
    def dear(rows: int) -> float:
        return float(rows)

    texts = [[7 + n, 8, 9, *answer_of([7 + n, 8, 9], ENDLESS)] for n in range(3)]
    plain = seconds_taken(dear, None, num_requests)
    assert seconds_taken(dear, foreseeing(texts, 97), num_requests) < 1.05 * plain
    # Wrong guesses never pay unless their rows are free.
    wrong = seconds_taken(lambda rows: 1.0 + 0.1 * rows, foreseeing([], 97), num_requests)
    assert wrong < 1.05 * seconds_taken(lambda rows: 1.0 + 0.1 * rows, None, num_requests)


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
