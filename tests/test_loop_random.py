"""Random arrivals, aborts and steps in tiny pools: nothing leaks, nothing is lost or finished twice."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxserve.loop import HostLoop
from jaxserve.outputs import AnswerDelta, RequestOutput
from jaxserve.plan import SamplingParams
from jaxserve.scheduling import DEFAULT_POLICY, CacheIdentity, SchedulerPolicy, ServiceTerms
from jaxserve.scheduling.offload import Offload
from jaxserve.scheduling.offload_cost import Rate, TransferRates
from jaxserve.scheduling.offload_tier import Bytes, HostMemoryTier, TierRead
from jaxserve.scheduling.page_swap import PageSwap
from jaxserve.speculation import EngineDrafter, Speculation
from tests.drafters import foreseeing
from tests.fake_draft_model import FakeDraftingEngine
from tests.fake_engine import FakeEngine
from tests.fake_limits import make_limits
from tests.fake_prefill import FakePrefill
from tests.fake_replicas import fake_engine
from tests.fake_sequence import expected_answer
from tests.policies import UNFORESEEN

POOLS = [((15,), (0,)), ((15, 6), (0, 6)), ((7,), (9,)), ((15, 7, 5), (0, 11, 3))]
MAX_TOKENS = 20

requests = st.fixed_dictionaries(
    {
        "prompt": st.one_of(
            st.lists(st.integers(0, 96), min_size=1, max_size=30),
            st.integers(1, 30)
            .map(lambda length: [7, 8, 9] * 10 + [length] * (length % 3))
            .flatmap(lambda text: st.integers(1, len(text)).map(lambda end: text[:end])),
        ),
        "n": st.sampled_from([1, 1, 2, 3]),
        "max_tokens": st.integers(1, MAX_TOKENS),
        "min_tokens": st.integers(0, 1),
        "stop_token_ids": st.lists(st.integers(0, 96), max_size=12),
        "prompt_logprobs": st.sampled_from([None, None, 0]),
        "ignore_eos": st.booleans(),
    }
)
terms = st.fixed_dictionaries(
    {
        "tenant": st.sampled_from(["", "a", "b"]),
        "namespace": st.sampled_from([None, None, "shared", "a"]),
        "priority": st.sampled_from(["interactive", "default", "batch"]),
        "is_retry": st.booleans(),
        "cache_read": st.sampled_from([True, True, False]),
        "cache_write": st.sampled_from([True, True, False]),
    }
)


class FaultyTier(HostMemoryTier):
    """Now and then it fails, loses or spoils what it holds."""

    def __init__(self, num_slots: int, page_bytes: int, faults: float, seed: int) -> None:
        super().__init__(num_slots, page_bytes)
        self._faults = faults
        self._random = Random(seed)

    def write(self, slot: int, data: Bytes) -> None:
        if self._fails():
            raise OSError("no space left")
        super().write(slot, data)

    def read(self, slots: Sequence[int]) -> TierRead:
        if self._fails():
            raise OSError("connection refused")
        read = super().read(slots)
        contents = read.take()
        for number, data in enumerate(contents):
            if data is not None and self._fails():
                data[self._random.randrange(len(data))] ^= 1
            if self._fails():
                contents[number] = None
        return read

    def _fails(self) -> bool:
        return self._random.random() < self._faults


class LoopMachine(RuleBasedStateMachine):
    @initialize(
        pool=st.sampled_from(POOLS),
        overlap=st.booleans(),
        max_chunk=st.sampled_from([1, 3, 16]),
        num_slots=st.integers(1, 5),
        caches=st.sampled_from([True, True, False]),
        copies_pages=st.booleans(),
        max_iterations=st.sampled_from([1, 1, 4]),
        max_drafts=st.sampled_from([0, 0, 1, 4]),
        adaptive=st.booleans(),
        drafts_itself=st.booleans(),
        tier=st.fixed_dictionaries(
            {
                "num_slots": st.sampled_from([0, 2, 9, 50, 50]),
                "faults": st.sampled_from([0.0, 0.1, 0.5]),
                "seed": st.integers(0, 9),
            }
        ),
        slowness=st.sampled_from([1e-9, 1e-9, 1e-9, 1.0]),
        policy=st.sampled_from([UNFORESEEN, UNFORESEEN, DEFAULT_POLICY]),
        num_replicas=st.sampled_from([1, 1, 1, 2, 3]),
        prefill=st.one_of(
            st.none(),
            st.fixed_dictionaries(
                {"share": st.sampled_from([0.5, 1.0, 2.0]), "num_slots": st.integers(1, 4)},
            ),
        ),
    )
    def start(
        self,
        pool: Any,
        overlap: bool,
        max_chunk: int,
        num_slots: int,
        caches: bool,
        copies_pages: bool,
        max_iterations: int,
        max_drafts: int,
        adaptive: bool,
        drafts_itself: bool,
        tier: dict[str, Any],
        slowness: float,
        policy: SchedulerPolicy,
        num_replicas: int,
        prefill: dict[str, Any] | None,
    ) -> None:
        num_pages, windows = pool
        self.limits = make_limits(
            num_slots=num_slots * num_replicas,
            num_replicas=num_replicas,
            num_pages=num_pages,
            windows=windows,
            max_model_len=52,
            chunk_rows=(8, 16),
            copies_pages=copies_pages,
            max_iterations=max_iterations,
            max_drafts=max_drafts,
        )
        by_model = drafts_itself and max_drafts > 0 and 0 in windows and num_replicas == 1
        engine = FakeDraftingEngine(self.limits) if by_model else fake_engine(self.limits)
        engine.domain_of = lambda load: self.domains[load.seed]
        self.now = 0.0
        cache = CacheIdentity(model="fake", kv_format="fake") if caches else None
        swap = None
        if caches and tier["num_slots"] and isinstance(engine, FakeEngine):
            tiers = [FaultyTier(page_bytes=size, **tier) for size in engine.page_bytes]
            offload = Offload(tiers, engine, self.limits.page_size, windows)
            rates = TransferRates(Rate(1 / slowness), Rate(1 / slowness))
            swap = PageSwap(offload, rates, lambda: self.now)
        self.texts: list[list[int]] = []
        """Every sample with its prompt, for the drafters to know."""
        speculation = (
            Speculation(
                drafter=EngineDrafter if by_model else foreseeing(self.texts, self.limits.vocab_size),
                max_drafts=max_drafts,
                adaptive=adaptive,
            )
            if max_drafts
            else None
        )
        self.prefill = None
        if prefill and num_replicas == 1 and not by_model and isinstance(engine, FakeEngine):
            own_pages = [2 + int(prefill["share"] * (pages - 2)) for pages in num_pages]
            self.prefill = FakePrefill(
                engine, num_pages=own_pages, num_slots=prefill["num_slots"], cache=cache
            )
            self.prefill.engine.steps_done = 0
        self.loop = HostLoop(
            engine,
            overlap=overlap,
            max_chunk=max_chunk,
            cache=cache,
            swap=swap,
            clock=lambda: self.now,
            policy=policy,
            speculation=speculation,
            prefills=None if self.prefill is None else self.prefill.side,
        )
        self.submitted: dict[str, tuple[list[int], SamplingParams]] = {}
        self.deadlines: dict[str, float] = {}
        self.domains: list[tuple[str, str]] = []
        """Of each request, which it has for its seed, who may share its pages."""
        self.open: set[str] = set()
        self.aborted: set[str] = set()
        self.streamed: dict[tuple[str, int], list[int]] = {}
        self.ended: set[tuple[str, int]] = set()

    @rule(request=requests, term=terms, patience=st.sampled_from([None, None, None, 1.0, 5.0]))
    def submit(self, request: dict[str, Any], term: dict[str, Any], patience: float | None) -> None:
        prompt = request.pop("prompt")
        params = SamplingParams(seed=len(self.submitted), **request)
        name = str(len(self.submitted))
        namespace, tenant = term["namespace"], term["tenant"]
        self.domains.append(("tenant", tenant) if namespace is None else ("namespace", namespace))
        if patience is not None:
            self.deadlines[name] = term["deadline"] = self.now + patience
        self.loop.add(name, prompt, params, terms=ServiceTerms(**term))
        self.submitted[name] = prompt, params
        for index in range(params.n):
            answer, *_ = expected_answer(self.limits, prompt, params, params.seed or 0, index)
            self.texts.append(prompt + answer)
        self.open.add(name)

    @rule()
    def run_dry(self) -> None:
        """What is idle is written early, and what comes next finds it."""
        for delta in self.loop.run_until_idle():
            self.now += 0.25
            self.take(delta)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.open)))
        assert self.loop.abort(name)
        assert not self.loop.abort(name)
        self.open.discard(name)
        self.aborted.add(name)

    @precondition(lambda self: self.prefill is not None)
    @rule(count=st.integers(1, 4))
    def compute_prompts(self, count: int) -> None:
        """The steps of the prefill side come to their ends, whenever it suits them."""
        engine = self.prefill.engine
        engine.steps_done = max(engine.steps_done, engine.num_collected) + count

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.now += 0.25
            for delta in self.loop.step():
                self.take(delta)

    def take(self, delta: AnswerDelta) -> None:
        key = (delta.request_id, delta.index)
        assert key not in self.ended, "a sample ended twice, or went on after its end"
        self.streamed.setdefault(key, []).extend(delta.token_ids)
        if delta.finish_reason is not None:
            self.ended.add(key)
        if delta.output is not None:
            self.open.discard(delta.request_id)
            self.check_output(delta.output)

    def check_output(self, output: RequestOutput) -> None:
        prompt, params = self.submitted[output.request_id]
        for index, completion in enumerate(output.outputs):
            assert completion.token_ids == self.streamed[output.request_id, index]
            expected = expected_answer(self.limits, prompt, params, output.seed, index)
            if completion.finish_reason in ("abort", "expired"):
                if completion.finish_reason == "abort":
                    assert output.request_id in self.aborted
                else:
                    assert self.deadlines[output.request_id] <= self.now
                assert completion.token_ids == expected[0][: len(completion.token_ids)]
            else:
                assert (completion.token_ids, completion.finish_reason, completion.stop_reason) == expected

    @invariant()
    def accounts_balance(self) -> None:
        self.loop.check_integrity()
        assert self.loop.num_open == len(self.open)

    def teardown(self) -> None:
        for delta in self.loop.run_until_idle():
            self.now += 0.25
            self.take(delta)
        self.loop.check_integrity()
        assert not self.open
        assert self.loop.idle
        assert self.loop.num_running == 0
        expected = {(name, i) for name, (_, params) in self.submitted.items() for i in range(params.n)}
        assert self.ended == expected


TestLoopMachine = LoopMachine.TestCase
TestLoopMachine.settings = settings(
    max_examples=120, stateful_step_count=30, deadline=None, derandomize=True, database=None
)
