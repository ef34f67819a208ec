"""The service that both doors share, over the fake engine: answers, refusals, deadlines, draining."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest

from jaxserve.loop import HostLoop
from jaxserve.plan import SamplingParams
from jaxserve.structured import CheckLostError
from server.core import HTTP_CODES, GenerateRequest, RequestRecord, Service, ServiceError, Status
from server.core.generation import Generation
from tests.fake_engine import FakeEngine
from tests.fake_model import fake_limits
from tests.server.harness import (
    ENDLESS,
    GREEDY,
    IDENTITY,
    TOKENIZER,
    HangingEngine,
    PacedEngine,
    SlowEngine,
    answer,
    expected,
    serving,
)

CHAT = [{"role": "user", "content": "hi"}]


async def attempt(service: Service) -> Generation | ServiceError:
    """A request that runs for ever, or why there is none."""
    try:
        return await service.generate(GenerateRequest(text="x", params=ENDLESS))
    except ServiceError as error:
        return error


async def refused(service: Service, **fields: Any) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        await service.generate(GenerateRequest(**({"text": "x", "params": GREEDY} | fields)))
    return caught.value


def test_every_status_has_an_http_code_of_its_own() -> None:
    assert set(HTTP_CODES) == set(Status)
    assert len(set(HTTP_CODES.values())) == len(Status)
    assert all(400 <= code < 600 for code in HTTP_CODES.values())


@pytest.mark.parametrize("n", [1, 3])
def test_text_ids_and_messages_are_answered(n: int) -> None:
    async def main() -> None:
        params = replace(GREEDY, n=n)
        async with serving() as (service, _):
            generation = await service.generate(GenerateRequest(text="hello", params=params))
            deltas = [delta async for delta in generation]
            assert generation.prompt_token_ids == TOKENIZER.encode("hello")
            output = deltas[-1].output
            assert output is not None
            for sample in output.outputs:
                streamed = [token for d in deltas if d.index == sample.index for token in d.token_ids]
                assert streamed == sample.token_ids == expected("hello", GREEDY)
                assert "".join(d.text for d in deltas if d.index == sample.index) == sample.text

    asyncio.run(main())


def test_the_three_kinds_of_prompt() -> None:
    async def main() -> None:
        async with serving() as (service, _):
            ids = TOKENIZER.encode("hello")
            assert await answer(service, GenerateRequest(token_ids=ids, params=GREEDY)) == expected(
                "hello", GREEDY
            )
            rendered = TOKENIZER.render_chat(CHAT)
            assert await service.tokenize_messages(CHAT) == TOKENIZER.encode(rendered, False)
            generation = await service.generate(GenerateRequest(messages=CHAT, params=GREEDY))
            assert generation.prompt_token_ids == TOKENIZER.encode(rendered, False)
            await generation.aclose()
            closed = await service.tokenize_messages(CHAT, {"add_generation_prompt": False})
            assert closed == TOKENIZER.encode("[user]hi", False)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"text": None}, Status.INVALID_ARGUMENT, "exactly one"),
        ({"messages": CHAT}, Status.INVALID_ARGUMENT, "exactly one"),
        ({"text": None, "token_ids": []}, Status.INVALID_ARGUMENT, "empty"),
        ({"text": None, "token_ids": [258]}, Status.INVALID_ARGUMENT, "258"),
        ({"text": "x" * 500}, Status.INVALID_ARGUMENT, "127"),
        ({"text": None, "messages": [{"content": "no role"}]}, Status.INVALID_ARGUMENT, "role"),
        ({"params": replace(GREEDY, logprobs=9)}, Status.INVALID_ARGUMENT, "limit"),
        ({"deadline": 0.0}, Status.DEADLINE_EXCEEDED, "passed"),
        ({"deadline": float("nan")}, Status.INVALID_ARGUMENT, "deadline"),
        ({"request_id": "x" * 257}, Status.INVALID_ARGUMENT, "256"),
        ({"tenant": "x" * 257}, Status.INVALID_ARGUMENT, "256"),
        ({"priority": "gold"}, Status.INVALID_ARGUMENT, "'gold'"),
        ({"priority": "gold"}, Status.INVALID_ARGUMENT, "interactive, default, retry, batch"),
        ({"cache_namespace": ""}, Status.INVALID_ARGUMENT, "namespace"),
        ({"cache_namespace": "x" * 257}, Status.INVALID_ARGUMENT, "256"),
    ],
)
def test_what_cannot_be_served_is_refused_with_a_sentence(
    fields: dict[str, Any], status: Status, words: str
) -> None:
    async def main() -> None:
        async with serving() as (service, _):
            error = await refused(service, **fields)
            assert error.status is status
            assert words in error.message
            assert service.statistics.num_refused == {status: 1}
            assert service.statistics.num_admitted == 0

    asyncio.run(main())


def test_a_full_queue_refuses_at_once_and_says_when_to_return() -> None:
    async def main() -> None:
        async with serving(max_waiting=2) as (service, loop):
            streams = [
                await service.generate(GenerateRequest(text="x", params=ENDLESS))
                for _ in range(loop.limits.num_slots + 2)
            ]
            error = await refused(service)
            assert error.status is Status.RESOURCE_EXHAUSTED
            assert "limit is 2" in error.message
            assert error.retry_after == 1.0  # Nothing has ended yet, so nothing is known.
            for stream in streams[:2]:
                assert [delta async for delta in stream][-1].output is not None
            while not isinstance(answer := await attempt(service), ServiceError):
                streams.append(answer)
            later = answer.retry_after
            assert later is not None
            assert 0.05 <= later < 60
            for stream in streams:
                await stream.aclose()

    asyncio.run(main())


def test_the_deadline_ends_a_request_and_frees_it() -> None:
    async def main() -> None:
        async with serving(SlowEngine(fake_limits())) as (service, loop):
            request = GenerateRequest(text="x", params=ENDLESS, deadline=0.05)
            with pytest.raises(ServiceError) as caught:
                await answer(service, request)
            assert caught.value.status is Status.DEADLINE_EXCEEDED
            assert loop.snapshot().num_sampled < 100
            assert service.statistics.num_failed == {Status.DEADLINE_EXCEEDED: 1}
            in_time = replace(request, params=GREEDY, deadline=20.0)
            assert await answer(service, in_time) == expected("x", GREEDY)

    asyncio.run(main())


def test_the_deadline_does_not_wait_for_the_device() -> None:
    async def main() -> None:
        device = HangingEngine(fake_limits())
        async with serving(device) as (service, _):
            with pytest.raises(ServiceError) as caught:
                await answer(service, GenerateRequest(text="x", params=ENDLESS, deadline=0.02))
            assert caught.value.status is Status.DEADLINE_EXCEEDED
            device.released.set()

    asyncio.run(main())


def test_an_abort_reaches_only_the_tenants_own_request() -> None:
    async def main() -> None:
        async with serving() as (service, _):
            request = GenerateRequest(text="x", params=ENDLESS, request_id="one", tenant="a")
            stream = await service.generate(request)
            other = await service.generate(replace(request, tenant="b"))
            again = await refused(service, request_id="one", tenant="a")
            assert again.status is Status.INVALID_ARGUMENT
            assert not service.abort("one")
            assert not service.abort("two", "a")
            assert service.abort("one", "a")
            assert [delta async for delta in stream][-1].finish_reason == "abort"
            assert not service.abort("one", "a")
            assert (await anext(other)).finish_reason is None
            await other.aclose()

    asyncio.run(main())


@pytest.mark.parametrize("way", ["close", "cancel", "drop"])
def test_who_stops_listening_frees_the_request(way: str) -> None:
    async def listen(service: Service) -> None:
        async for _ in await service.generate(GenerateRequest(text="x", params=ENDLESS)):
            pass

    async def main() -> None:
        async with serving() as (service, loop):
            if way == "cancel":
                task = asyncio.create_task(listen(service))
                await asyncio.sleep(0.02)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            else:
                generation = await service.generate(GenerateRequest(text="x", params=ENDLESS))
                await anext(generation)
                if way == "close":
                    await generation.aclose()
                del generation
            while not loop.idle:
                await asyncio.sleep(0.001)
            assert loop.snapshot().num_sampled < 100
            assert await service.drain(1.0)

    asyncio.run(main())


def test_a_slow_reader_gets_what_has_come_at_once() -> None:
    async def main() -> None:
        async with serving() as (service, _):
            generation = await service.generate(GenerateRequest(text="x", params=ENDLESS))
            while service.engine.num_open:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.05)  # The last delta is on its way then.
            batch = await generation.next_batch()
            assert [token for delta in batch for token in delta.token_ids] == expected("x", ENDLESS)
            assert await generation.next_batch() == []
            assert service.statistics.num_finished == {"length": 1}

    asyncio.run(main())


def test_draining_lets_open_requests_finish_and_takes_no_new_ones() -> None:
    async def main() -> None:
        async with serving() as (service, _):
            reader = asyncio.create_task(answer(service, GenerateRequest(text="x", params=ENDLESS)))
            await asyncio.sleep(0.02)
            assert service.ready
            drain = asyncio.create_task(service.drain(10.0))
            await asyncio.sleep(0)
            assert (await refused(service)).status is Status.UNAVAILABLE
            assert not service.ready
            assert await drain
            assert await reader == expected("x", ENDLESS)

    asyncio.run(main())


def test_what_outlasts_the_drain_ends_as_unavailable() -> None:
    async def main() -> None:
        async with serving(SlowEngine(fake_limits())) as (service, _):
            reader = asyncio.create_task(answer(service, GenerateRequest(text="x", params=ENDLESS)))
            await asyncio.sleep(0.02)
            assert not await service.drain(0.01)
            with pytest.raises(ServiceError) as caught:
                await reader
            assert caught.value.status is Status.UNAVAILABLE

    asyncio.run(main())


def test_a_failing_device_is_internal_for_everybody() -> None:
    async def main() -> None:
        async with serving(FakeEngine(fake_limits(), fail_at=3)) as (service, _):
            with pytest.raises(ServiceError) as caught:
                await answer(service, GenerateRequest(text="x", params=ENDLESS))
            assert caught.value.status is Status.INTERNAL
            assert "device has gone" not in caught.value.message
            assert (await refused(service)).status is Status.INTERNAL
            assert not service.ready

    asyncio.run(main())


def test_tokens_there_and_back() -> None:
    async def main() -> None:
        async with serving() as (service, _):
            for text in ("héllo", "long " * 5000):
                ids = await service.tokenize(text)
                assert ids == TOKENIZER.encode(text)
                assert service.detokenize(ids) == text
            assert service.detokenize([0, 5], skip_special_tokens=False).startswith("<s>")
            for token_id in (-1, 258):
                with pytest.raises(ServiceError, match=f"token id {token_id} .* 258 ids"):
                    service.detokenize([token_id])

    asyncio.run(main())


@pytest.mark.parametrize("pages", [257, 9])
def test_an_answer_may_take_what_the_longest_sequence_leaves(pages: int) -> None:
    class Endless(FakeEngine):
        pass

    async def main() -> None:
        limits = replace(fake_limits(), num_pages=(pages,))
        async with serving(Endless(limits)) as (service, _):
            params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=1)
            tokens = await answer(service, GenerateRequest(text="xyz", params=params, until_full=True))
            assert len(tokens) == min(128, (pages - 1) * 4 + 1) - 4

    asyncio.run(main())


def test_load_statistics_and_receipts() -> None:
    records: list[RequestRecord] = []

    async def main() -> None:
        async with serving() as (service, loop):
            service.observers.append(records.append)
            stream = await service.generate(GenerateRequest(text="hello", params=ENDLESS, request_id="named"))
            for _ in range(20):
                await anext(stream)
            load = service.load()
            assert (load.num_running, load.num_waiting, load.num_slots) == (1, 0, 4)
            assert 0 < load.kv_usage < 0.5
            assert [delta async for delta in stream][-1].output is not None
            while not loop.idle:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.01)
            assert service.load().kv_usage == 0.0
            assert service.statistics.num_completion_tokens == 100
            assert service.statistics.num_prompt_tokens == 6
        (record,) = records
        assert record.receipt is not None
        assert record.receipt.kv_format == "int8"
        assert record.receipt.model_fingerprint == IDENTITY.fingerprint
        assert record.receipt.decoding == "greedy"
        assert record.request_id == "named"

    asyncio.run(main())


def test_load_counts_pages_under_a_paced_device() -> None:
    async def main() -> None:
        async with serving(PacedEngine(fake_limits())) as (service, loop):
            streams = [await service.generate(GenerateRequest(text="x", params=ENDLESS)) for _ in range(6)]
            for _ in range(5):
                await anext(streams[0])
            load = service.load()
            assert load.num_running == loop.limits.num_slots
            assert load.num_waiting == 2
            assert load.num_pages == 256
            for stream in streams:
                await stream.aclose()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("fault", "status"),
    [
        (ValueError("regex: it takes over 1 s"), Status.INVALID_ARGUMENT),
        (CheckLostError("its process has gone"), Status.UNAVAILABLE),
    ],
)
def test_what_the_engine_does_not_take_after_all_ends_with_a_status_of_its_own(
    monkeypatch: pytest.MonkeyPatch, fault: Exception, status: Status
) -> None:
    check = HostLoop.check

    def check_again(loop: HostLoop, *args: Any) -> None:
        if threading.current_thread().name == "jaxserve-loop":
            raise fault
        check(loop, *args)

    async def main() -> None:
        async with serving() as (service, _):
            records: list[RequestRecord] = []
            service.observers.append(records.append)
            with monkeypatch.context() as patch:
                patch.setattr(HostLoop, "check", check_again)
                generation = await service.generate(GenerateRequest(text="x", params=GREEDY))
                with pytest.raises(ServiceError, match=str(fault)) as caught:
                    await anext(generation)
            assert caught.value.status is status
            assert [record.error for record in records] == [caught.value]
            assert await answer(service, GenerateRequest(text="x", params=GREEDY)) == expected("x", GREEDY)

    asyncio.run(main())
