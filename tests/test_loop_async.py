"""The asynchronous engine over a fake one: streams, aborts, cancellation, errors, sleep."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from jaxserve.async_engine import AnswerStream, Engine
from jaxserve.loop import HostLoop, LoopStoppedError
from jaxserve.outputs import AnswerDelta, RequestOutput
from jaxserve.plan import Grammar, SamplingParams, StepHandle, StepResult
from jaxserve.structured import CheckLostError
from tests.fake_engine import FakeEngine
from tests.fake_limits import make_limits
from tests.fake_sequence import expected_answer

LIMITS = make_limits()
ENDLESS = SamplingParams(max_tokens=100, ignore_eos=True, seed=1)
SHORT = SamplingParams(max_tokens=6, ignore_eos=True, seed=1)


class PacedEngine(FakeEngine):
    """Takes a moment for each step, as a device would."""

    num_collected = 0

    def collect(self, handle: StepHandle) -> StepResult:
        time.sleep(0.002)
        self.num_collected += 1
        return super().collect(handle)


@contextmanager
def serving(device: FakeEngine | None = None) -> Iterator[tuple[Engine, HostLoop]]:
    """An engine, and its loop to look at when the engine has been closed."""
    loop = HostLoop(device or PacedEngine(LIMITS))
    engine = Engine(loop)
    try:
        yield engine, loop
    finally:
        if engine.failure is None:
            engine.close()
    loop.check_integrity()
    assert loop.idle
    assert not [thread for thread in threading.enumerate() if thread.name == "jaxserve-loop"]


async def read(stream: AnswerStream) -> tuple[list[AnswerDelta], RequestOutput]:
    deltas = [delta async for delta in stream]
    output = deltas[-1].output
    assert output is not None
    return deltas, output


async def until_idle(loop: HostLoop) -> None:
    while not loop.idle:
        await asyncio.sleep(0.001)


def test_concurrent_streams_bring_what_the_loop_brings() -> None:
    async def main(engine: Engine) -> None:
        cases = [([1, 2, number], SamplingParams(max_tokens=9, seed=number, n=2)) for number in range(20)]
        results = await asyncio.gather(*(read(engine.submit(*case)) for case in cases))
        for (prompt, params), (deltas, output) in zip(cases, results, strict=True):
            for sample in output.outputs:
                expected = expected_answer(LIMITS, prompt, params, output.seed, sample.index)
                assert (sample.token_ids, sample.finish_reason, sample.stop_reason) == expected
                streamed = [token for d in deltas if d.index == sample.index for token in d.token_ids]
                assert streamed == sample.token_ids

    with serving() as (engine, _):
        asyncio.run(main(engine))


def test_tokens_stream_before_the_end() -> None:
    async def main(engine: Engine) -> None:
        stream = engine.submit([1], ENDLESS, "named")
        first = await anext(stream)
        assert first.request_id == stream.request_id == "named"
        assert len(first.token_ids) == 1
        assert first.output is None
        await stream.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    with serving() as (engine, _):
        asyncio.run(main(engine))


def test_an_abort_ends_the_stream_with_what_there_is() -> None:
    async def main(engine: Engine) -> None:
        stream = engine.submit([1], ENDLESS)
        await anext(stream)
        engine.abort(stream.request_id)
        deltas, output = await read(stream)
        assert deltas[-1].finish_reason == "abort"
        assert 0 < len(output.outputs[0].token_ids) < 100
        engine.abort(stream.request_id)
        engine.abort("unknown")

    with serving() as (engine, _):
        asyncio.run(main(engine))


@pytest.mark.parametrize("way", ["cancel", "leave", "drop"])
def test_who_stops_listening_aborts_the_request_within_a_step(way: str) -> None:
    device = PacedEngine(LIMITS)

    async def listen(stream: AnswerStream) -> None:
        async for _ in stream:
            pass

    async def main(engine: Engine, loop: HostLoop) -> None:
        if way == "cancel":
            task = asyncio.create_task(listen(engine.submit([1], ENDLESS)))
            await asyncio.sleep(0.02)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        elif way == "leave":
            async with engine.submit([1], ENDLESS) as stream:
                await anext(stream)
        else:
            async for _ in engine.submit([1], ENDLESS):
                break
            gc.collect()
        num_collected = device.num_collected
        await until_idle(loop)
        # The step that was running, the one planned beside it, and one that began before the abort.
        assert device.num_collected <= num_collected + 3

    with serving(device) as (engine, loop):
        asyncio.run(main(engine, loop))


def test_an_event_loop_that_closes_leaves_no_request_behind() -> None:
    with serving() as (engine, loop):
        streams: list[AnswerStream] = []

        async def main() -> None:
            streams.append(engine.submit([1], ENDLESS))
            await anext(streams[0])

        asyncio.run(main())
        deadline = time.monotonic() + 5
        while not loop.idle and time.monotonic() < deadline:
            time.sleep(0.001)
        assert loop.idle


def test_refusals_reach_the_caller_and_nobody_else() -> None:
    async def main(engine: Engine) -> None:
        stream = engine.submit([1], SHORT, "a")
        with pytest.raises(ValueError, match="empty"):
            engine.submit([], SHORT)
        with pytest.raises(ValueError, match="'a' is in use"):
            engine.submit([1], SHORT, "a")
        _, output = await read(stream)
        assert len(output.outputs[0].token_ids) == 6

    with serving() as (engine, _):
        asyncio.run(main(engine))


def test_an_error_reaches_every_stream_and_the_closer() -> None:
    error = RuntimeError("no device")
    device = PacedEngine(LIMITS, fail_at=3, error=error)

    async def main(engine: Engine) -> None:
        streams = [engine.submit([number], ENDLESS) for number in range(3)]
        results = await asyncio.gather(*map(read, streams), return_exceptions=True)
        for result in results:
            assert isinstance(result, LoopStoppedError)
            assert result.__cause__ is error
        with pytest.raises(LoopStoppedError, match="no device"):
            engine.submit([1], SHORT)

    with serving(device) as (engine, loop):
        asyncio.run(main(engine))
        loop.take_deltas()
        with pytest.raises(LoopStoppedError, match="no device") as raised:
            engine.close()
        assert raised.value.__cause__ is engine.failure is error


def test_closing_aborts_what_is_open() -> None:
    async def main(engine: Engine) -> None:
        async with engine:
            stream = engine.submit([1], ENDLESS)
            await anext(stream)
        _, output = await read(stream)
        assert output.outputs[0].finish_reason == "abort"
        with pytest.raises(LoopStoppedError, match="closed"):
            engine.submit([1], SHORT)

    with serving() as (engine, _):
        asyncio.run(main(engine))


def test_the_idle_thread_sleeps() -> None:
    async def main(engine: Engine) -> None:
        await read(engine.submit([1], SHORT))
        await asyncio.sleep(0.05)
        started = time.process_time()
        await asyncio.sleep(0.3)
        assert time.process_time() - started < 0.1
        await read(engine.submit([1], SHORT))

    with serving() as (engine, _):
        asyncio.run(main(engine))


def test_a_listener_that_lags_takes_what_has_arrived() -> None:
    async def main(engine: Engine) -> None:
        stream = engine.submit([1], SHORT)
        first = await anext(stream)
        while engine.num_open:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.02)
        deltas = [first, *stream.take_ready()]
        output = deltas[-1].output
        assert output is not None
        assert [token for delta in deltas for token in delta.token_ids] == output.outputs[0].token_ids
        assert stream.take_ready() == []
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    with serving() as (engine, _):
        asyncio.run(main(engine))


def test_an_interrupted_listener_need_not_wait_for_the_device() -> None:
    released = threading.Event()

    class HangingEngine(FakeEngine):
        def collect(self, handle: StepHandle) -> StepResult:
            assert released.wait(30)
            return super().collect(handle)

    async def main(engine: Engine) -> None:
        stream = engine.submit([1], ENDLESS)
        asyncio.get_running_loop().call_later(0.01, stream.interrupt, TimeoutError("too late"))
        with pytest.raises(TimeoutError, match="too late"):
            await anext(stream)
        released.set()
        assert stream.take_ready() == []
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    with serving(HangingEngine(LIMITS)) as (engine, _):
        asyncio.run(main(engine))


def test_a_snapshot_shows_what_runs_and_what_is_free() -> None:
    async def main(engine: Engine) -> None:
        idle = engine.snapshot()
        assert idle.num_free_pages == (LIMITS.num_pages[0] - 1,)
        assert (idle.num_open, idle.num_running, idle.num_waiting) == (0, 0, 0)
        streams = [engine.submit([1, 2], ENDLESS) for _ in range(LIMITS.num_slots + 3)]
        assert engine.num_open == len(streams)
        await anext(streams[0])
        await anext(streams[0])
        busy = engine.snapshot()
        assert (busy.num_open, busy.num_running, busy.num_waiting) == (len(streams), LIMITS.num_slots, 3)
        assert busy.num_free_pages < idle.num_free_pages
        assert busy.num_steps > 0
        assert busy.num_sampled >= LIMITS.num_slots
        for stream in streams:
            await stream.aclose()

    with serving() as (engine, loop):
        asyncio.run(main(engine))
    assert loop.snapshot().num_free_pages == (LIMITS.num_pages[0] - 1,)


@pytest.mark.parametrize("fault", [ValueError("regex: it takes over 1 s"), CheckLostError("it has gone")])
def test_a_grammar_that_cannot_be_compiled_again_ends_its_request_alone(fault: Exception) -> None:
    class Forgetful:
        """Compiles a grammar once, where a request is submitted."""

        num_compiled = 0

        def compile(self, grammar: Grammar) -> object:
            self.num_compiled += 1
            if self.num_compiled > 1:
                raise fault
            return object()

    async def main(engine: Engine) -> None:
        gated = replace(SHORT, grammar=Grammar("regex", "a"))
        other = engine.submit([3, 4], SHORT, "other")
        with pytest.raises(type(fault), match=str(fault)):
            async for _ in engine.submit([3, 4], gated, "forgotten"):
                pass
        assert [delta async for delta in other][-1].output is not None
        again = engine.submit([3, 4], SHORT, "forgotten")
        assert [delta async for delta in again][-1].output is not None
        assert engine.failure is None

    loop = HostLoop(PacedEngine(LIMITS), grammars=Forgetful())  # type: ignore[arg-type]
    engine = Engine(loop)
    asyncio.run(main(engine))
    engine.close()
    loop.check_integrity()
