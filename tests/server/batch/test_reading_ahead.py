"""How much of a batch is in memory, and in which order it goes to the engine."""

from __future__ import annotations

import gc
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.outputs import RequestOutput
from jaxserve.plan import SamplingParams, SlotLoad, StepHandle, StepPlan
from jaxserve.scheduling import ServiceTerms
from server.batch.ledger import Ledger
from server.batch.lines import InputLine, line_of
from server.batch.records import RecordHead
from server.batch.requests import LineRequest, PreparedPrompt, PreparedRequest
from server.batch.sweep import Sweep
from tests.fake_engine import FakeEngine
from tests.fake_model import fake_limits
from tests.server.batch.conftest import by_name, completion, run_over, write_lines

STATUS = Path("/proc/self/status")
TOKEN_IDS = st.lists(st.integers(0, 3) | st.integers(250, 70_000), max_size=5)


def prepared(number: int, token_ids: Sequence[int], data: bytes = b"x") -> PreparedRequest:
    prompt = PreparedPrompt(np.array(token_ids, ">u4").tobytes(), None, SamplingParams(), ServiceTerms())
    return PreparedRequest(line_of(number, data), str(number), "", [prompt], None)  # type: ignore[arg-type]


def ids_of(request: PreparedRequest) -> list[int]:
    return list(request.prompts[0].encoded.token_ids)


@given(st.lists(TOKEN_IDS | st.none(), max_size=60))
def test_the_sweep_gives_everything_once_and_the_next_in_order(moves: list[list[int] | None]) -> None:
    """Token ids are added; None takes one."""
    sweep, here, last, added = Sweep(10, 1000), [], None, 0
    for move in moves:
        if move is not None:
            if not sweep.full:
                added += 1
                sweep.add(prepared(added, move))
                here.append((move, added))
            continue
        if not here:
            with pytest.raises(IndexError):
                sweep.take()
            continue
        ahead = [one for one in here if last is None or one > last]
        expected = min(ahead or here)
        assert sweep.next().line.number == expected[1]
        taken = sweep.take()
        assert (ids_of(taken), taken.line.number) == expected
        here.remove(expected)
        last = expected
        assert len(sweep) == len(here) <= 10


def test_the_sweep_is_full_by_number_or_by_size() -> None:
    sweep = Sweep(3, 100)
    sweep.add(prepared(1, [1], b"x" * 99))
    assert not sweep.full
    sweep.add(prepared(2, [2], b"x"))
    assert sweep.full
    sweep.take()
    assert not sweep.full
    sweep.add(prepared(3, [3], b""))
    sweep.add(prepared(4, [4], b""))
    assert sweep.full


def test_prompts_that_begin_alike_meet_if_enough_is_read_ahead(tmp_path: Path) -> None:
    """Twelve long beginnings, in turns, for a pool that has room for two."""
    beginnings = [f"{letter * 60} " for letter in "abcdefghijkl"]
    lines = [
        completion(f"{number}", f"{beginnings[number % 12]}{number}", max_tokens=1) for number in range(96)
    ]
    batch = write_lines(tmp_path / "in.jsonl", lines)

    def reused(read_ahead: int) -> float:
        limits = fake_limits(num_slots=1)
        limits = type(limits)(**vars(limits) | {"num_pages": (45,)})
        report = run_over(batch, tmp_path / f"{read_ahead}.jsonl", FakeEngine(limits), read_ahead)
        return report.num_cached_tokens / report.num_prompt_tokens

    assert reused(96) > 0.75
    assert reused(1) < 0.1
    first, second = by_name(tmp_path / "96.jsonl"), by_name(tmp_path / "1.jsonl")
    for name, record in first.items():
        assert record["response"]["body"]["choices"] == second[name]["response"]["body"]["choices"]


class CountingEngine(FakeEngine):
    """Keeps no record of what was asked, and knows how many sequences ran at once."""

    most_at_once = 0

    def load_slot(self, load: SlotLoad) -> None:
        super().load_slot(load)
        self.loads.clear()

    def dispatch(self, plan: StepPlan) -> StepHandle:
        handle = super().dispatch(plan)
        self.plans.clear()
        self.most_at_once = max(self.most_at_once, len(plan.sequences))
        return handle


def test_every_slot_is_used(tmp_path: Path) -> None:
    batch = write_lines(tmp_path / "in.jsonl", [completion(f"c{number}") for number in range(40)])
    device = CountingEngine(fake_limits(num_slots=8))
    run_over(batch, tmp_path / "out.jsonl", device)
    assert device.most_at_once == 8


def test_a_line_with_more_samples_than_slots_is_answered(tmp_path: Path) -> None:
    lines = [completion("wide", n=30), completion("narrow")]
    batch = write_lines(tmp_path / "in.jsonl", lines)
    run_over(batch, tmp_path / "out.jsonl")
    assert len(by_name(tmp_path / "out.jsonl")["wide"]["response"]["body"]["choices"]) == 30


def test_only_what_was_read_ahead_is_held(tmp_path: Path) -> None:
    lines = [
        completion(f"c{number}", f"{number}", **({} if number % 3 else {"temperature": -1}))
        for number in range(600)
    ]
    batch = write_lines(tmp_path / "in.jsonl", lines)
    held: list[int] = []

    def num_held() -> int:
        kinds = (InputLine, LineRequest, PreparedRequest, RequestOutput)
        return sum(isinstance(one, kinds) for one in gc.get_objects())

    gc.collect()
    by_others = num_held()

    def count(done: int, num_tokens: int) -> None:
        if done // 50 > len(held):
            held.append(num_held() - by_others)

    run_over(batch, tmp_path / "out.jsonl", CountingEngine(fake_limits()), 20, count)
    assert len(held) == 11
    num_open = 2 * fake_limits().num_slots
    # A line and its request are one object each, and an answer may be on its way to the file.
    assert max(held) <= 2 * (20 + num_open) + num_open


def test_the_ledger_keeps_its_names_out_of_memory() -> None:
    """As many names in a set would take twenty megabytes."""
    num_names = 150_000
    with Ledger() as ledger:
        before = resident_bytes()
        for number in range(1, num_names + 1):
            assert ledger.claim(f"request-{number:012d}", number) == number
            assert ledger.add(RecordHead(number, "0" * 16, failed=number % 2 == 0))
        assert resident_bytes() - before < 8 * 2**20
        assert ledger.claim("request-000000000007", num_names + 1) == 7
        assert ledger.digest(num_names) == "0" * 16
        assert ledger.digest(num_names + 1) is None
        assert not ledger.add(RecordHead(5, "1" * 16, failed=False))
        assert (ledger.num_answered, ledger.num_failed) == (num_names, num_names // 2)


def resident_bytes() -> int:
    """What the process has in memory."""
    if not STATUS.exists():
        pytest.skip(f"needs {STATUS}")
    return int(re.search(r"VmRSS:\s+(\d+) kB", STATUS.read_text())[1]) * 1024  # type: ignore[index]
