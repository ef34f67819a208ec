"""An engine's draft model in the host loop: what it reads, and what that costs."""

from __future__ import annotations

from jaxserve.loop import HostLoop
from jaxserve.outputs import RequestOutput
from jaxserve.plan import SamplingParams, StepHandle, StepResult
from jaxserve.scheduling import CacheIdentity
from jaxserve.speculation import EngineDrafter, Speculation
from tests.fake_draft_model import FakeDraftingEngine
from tests.fake_limits import make_limits
from tests.fake_sequence import expected_answer

LIMITS = make_limits(num_slots=4, max_model_len=512, num_pages=(600,), max_drafts=4)
CACHE = CacheIdentity(model="fake", kv_format="fake")
PROMPT = list(range(3, 43))


class TimedEngine(FakeDraftingEngine):
    """A step takes a second, a guess `guess_seconds` more, and a token to read `read_seconds`."""

    def __init__(self, guess_seconds: float, read_seconds: float, errors: float) -> None:
        super().__init__(LIMITS, num_reads=64, errors=errors)
        self.now = 0.0
        self._guess_seconds = guess_seconds
        self._read_seconds = read_seconds

    def collect(self, handle: StepHandle) -> StepResult:
        plan = handle.plan
        self.now += 1.0 + 0.01 * plan.num_rows
        if plan.drafts is not None:
            self.now += self._guess_seconds * int((plan.num_tokens - 1).max())
        if plan.reads is not None:
            self.now += self._read_seconds * int(plan.reads[:, 2].sum())
        return super().collect(handle)


def loop_of(engine: FakeDraftingEngine, *, adaptive: bool = False, cache: bool = False) -> HostLoop:
    now = (lambda: engine.now) if isinstance(engine, TimedEngine) else (lambda: 0.0)
    speculation = Speculation(drafter=EngineDrafter, max_drafts=4, adaptive=adaptive, name="draft:fake")
    return HostLoop(engine, clock=now, cache=CACHE if cache else None, speculation=speculation)


def answer(loop: HostLoop, prompt: list[int], max_tokens: int, seed: int = 1) -> RequestOutput:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=seed)
    loop.add("a", prompt, params)
    (output,) = [delta.output for delta in loop.run_until_idle() if delta.output]
    assert output.outputs[0].token_ids == expected_answer(LIMITS, prompt, params, seed)[0]
    loop.check_integrity()
    return output


def test_a_prompt_is_read_once_before_it_drafts_as_far_as_goes_at_a_time() -> None:
    engine = FakeDraftingEngine(LIMITS, num_reads=16, errors=0.0)
    output = answer(loop_of(engine), PROMPT, 40)
    assert [int(plan.reads[:, 2].sum()) for plan in engine.plans if plan.reads is not None] == [16, 16, 8 + 2]
    assert output.drafts.num_accepted == output.drafts.num_drafted > 25


def test_what_has_been_read_of_a_page_is_not_read_again() -> None:
    engine = FakeDraftingEngine(LIMITS, num_reads=64)
    loop = loop_of(engine, cache=True)
    answer(loop, PROMPT, 9)
    num_read = engine.num_read
    assert num_read == len(PROMPT)
    answer(loop, [*PROMPT, 5, 6], 9, seed=2)
    assert 2 <= engine.num_read - num_read <= 2 + LIMITS.page_size
    num_read = engine.num_read
    answer(loop, [9, *PROMPT], 9, seed=3)
    assert engine.num_read - num_read == len(PROMPT) + 1


def test_nothing_is_read_while_drafting_rests() -> None:
    """What is lost by finding out is a small part, long prompts included."""
    engine = TimedEngine(guess_seconds=0.5, read_seconds=0.05, errors=1.0)
    loop, num_read = loop_of(engine, adaptive=True), 0
    for number in range(12):
        answer(loop, [number + 3, *PROMPT * 2], 100, seed=number)
        num_read = num_read or engine.num_read
    standing = loop.snapshot().speculation
    assert standing is not None
    assert standing.state == "does_not_pay"
    assert num_read > 0
    assert engine.num_read < 5 * num_read
    plain = 12 * (101 * 1.01 + 0.81)
    assert engine.now < 1.03 * plain


def test_long_prompts_are_worth_reading_where_drafts_are_good() -> None:
    """What reading costs is set against the drafts that follow it, not against the next one alone."""
    engine = TimedEngine(guess_seconds=0.05, read_seconds=0.1, errors=0.05)
    loop = loop_of(engine, adaptive=True)
    outputs = [answer(loop, [number + 3, *PROMPT * 2], 200, seed=number) for number in range(4)]
    standing = loop.snapshot().speculation
    assert standing is not None
    assert standing.state == "drafting"
    assert all(output.drafts.num_accepted > 100 for output in outputs)
    assert engine.now < 0.5 * 4 * 200
    assert standing.seconds_saved > 0


def test_a_page_that_somebody_else_gets_has_not_been_read() -> None:
    """The engine complains of any guess that is made without having read all before it."""
    limits = make_limits(num_slots=1, num_pages=(16,), max_drafts=4, max_model_len=60)
    engine = FakeDraftingEngine(limits, num_reads=64)
    loop = loop_of(engine)
    for number in range(3):
        answer(loop, [number + 3, *PROMPT[:30]], 20, seed=number)
    assert engine.num_read == 3 * 31
