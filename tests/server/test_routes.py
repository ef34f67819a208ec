"""Several models behind one server: who answers, whose overflow goes where, what the receipt says of it."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest

from jaxserve.plan import SamplingParams
from server.core import GenerateRequest, Generation, Routes, RouteState, ServiceError, Status
from tests.fake_engine import FakeEngine
from tests.fake_model import fake_limits
from tests.server.harness import ENDLESS, GREEDY, PacedEngine, SlowEngine
from tests.server.routing import FALLBACKS, routed


def ask(**fields: Any) -> GenerateRequest:
    return GenerateRequest(**({"text": "x", "params": GREEDY} | fields))


async def fill(routes: Routes, *names: str) -> AsyncExitStack:
    """Long answers that take the one slot of routes."""
    stack = AsyncExitStack()
    for name in names:
        asked = ask(model=name, params=ENDLESS, fallback_route=name)
        await stack.enter_async_context(await routes.generate(asked))
    return stack


async def refused(routes: Routes, request: GenerateRequest) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        await routes.generate(request)
    return caught.value


@pytest.mark.parametrize(
    ("fallbacks", "words"),
    [
        ({}, "at least one route"),
        ({"a": "b"}, "route 'a' has the fallback 'b'; there are only a"),
        ({"a": "a"}, "circle: a -> a"),
        ({"a": "b", "b": "c", "c": "b"}, "circle: a -> b -> c -> b"),
    ],
)
def test_fallbacks_that_lead_nowhere_are_refused(fallbacks: dict[str, str | None], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Routes(fallbacks)


def test_a_request_goes_to_the_route_that_it_names_and_else_to_the_first() -> None:
    async def main() -> None:
        async with routed(FALLBACKS) as routes:
            assert routes.default == "chat"
            for model, route, reason in (
                (None, "chat", "default"),
                ("", "chat", "default"),
                ("chat", "chat", "requested"),
                ("tiny", "tiny", "requested"),
            ):
                generation = await routes.generate(ask(model=model))
                async for _ in generation:
                    pass
                output, receipt = generation.result()
                assert output.outputs[0].finish_reason == "length"
                assert (receipt.route, receipt.route_reason) == (route, reason)
                assert receipt.model == f"{route} model"
                assert (generation.choice.route, generation.choice.reason) == (route, reason)
            error = await refused(routes, ask(model="gpt-4"))
            assert error.status is Status.NOT_FOUND
            assert "'gpt-4' is not served here; served: 'chat', 'small', 'tiny'" in error.message
            error = await refused(routes, ask(fallback_route="gpt-4"))
            assert error.status is Status.NOT_FOUND
            assert "fallback route 'gpt-4'" in error.message

    asyncio.run(main())


def test_overflow_goes_down_the_fallbacks_and_the_receipt_says_why() -> None:
    async def main() -> None:
        async with routed(FALLBACKS) as routes, await fill(routes, "chat"):
            one = await routes.generate(ask())
            why = "overflow of chat: 0 requests wait already; the limit is 0"
            assert (one.choice.route, one.choice.reason) == ("small", why)
            other = await routes.generate(ask(model="chat"))  # `small` has one running now.
            assert (other.choice.route, other.choice.reason) == ("tiny", why)
            error = await refused(routes, ask())
            assert error.status is Status.RESOURCE_EXHAUSTED
            assert error.retry_after == 1.0
            assert error.message.startswith("0 requests wait already; the limit is 0; its fallback 'small': ")
            for generation in (one, other):
                assert [delta async for delta in generation][-1].output is not None

    asyncio.run(main())


def test_a_request_may_choose_its_own_fallback_or_none() -> None:
    async def main() -> None:
        async with routed(FALLBACKS) as routes, await fill(routes, "chat"):
            async with await routes.generate(ask(fallback_route="tiny")) as generation:
                assert generation.choice.route == "tiny"
            error = await refused(routes, ask(fallback_route="chat"))
            assert error.status is Status.RESOURCE_EXHAUSTED
            assert "its fallback" not in error.message

    asyncio.run(main())


def test_what_is_wrong_with_a_request_is_not_passed_on() -> None:
    async def main() -> None:
        async with routed(FALLBACKS) as routes:
            error = await refused(routes, ask(text="x" * 500))
            assert error.status is Status.INVALID_ARGUMENT
            assert routes.services[1].statistics.num_refused == {}

    asyncio.run(main())


def test_a_call_s_prompts_go_to_one_route_all_or_none() -> None:
    async def main() -> None:
        devices: dict[str, FakeEngine] = {
            "chat": SlowEngine(fake_limits(num_slots=2)),
            "small": SlowEngine(fake_limits(num_slots=3)),
        }
        async with routed({"chat": "small", "small": None}, devices=devices) as routes:
            chat, small = routes.services
            generations = await routes.generate_all([ask(), ask(), ask()])
            assert [generation.choice.route for generation in generations] == ["small"] * 3
            while chat.engine.num_open:  # The two that had been let in are gone again.
                await asyncio.sleep(0.005)
            with pytest.raises(ServiceError, match="its fallback 'small'"):
                await routes.generate_all([ask(), ask(), ask()])
            assert small.engine.num_open == 3
            for generation in generations:
                await generation.aclose()

    asyncio.run(main())


@pytest.mark.parametrize(
    "fields",
    [
        {"text": None, "token_ids": [5, 6]},
        {"params": replace(GREEDY, logit_bias={5: 1.0})},
        {"params": replace(GREEDY, stop_token_ids=(5,))},
    ],
)
def test_token_ids_overflow_only_to_the_same_tokenizer(fields: dict[str, Any]) -> None:
    async def main() -> None:
        identities = {"small": {"tokenizer_fingerprint": "another"}}
        async with routed(FALLBACKS, identities=identities) as routes, await fill(routes, "chat"):
            async with await routes.generate(ask(**fields)) as generation:
                assert generation.choice.route == "tiny"  # Past `small`, whose ids mean something else.
            error = await refused(routes, ask(fallback_route="small", **fields))
            assert error.status is Status.RESOURCE_EXHAUSTED
            assert "'small': the request names token ids, and this route has another tok" in error.message
            async with await routes.generate(ask(fallback_route="small")) as generation:
                assert generation.choice.route == "small"

    asyncio.run(main())


def test_a_route_that_loads_refuses_and_its_fallback_answers() -> None:
    async def main() -> None:
        async with routed({"chat": "small", "small": None, "tiny": None}, loaded=("small",)) as routes:
            assert not routes.ready
            states = [routes.state(name) for name in routes.names]
            assert states == [RouteState.LOADING, RouteState.READY, RouteState.LOADING]
            error = await refused(routes, ask(model="tiny"))
            assert (error.status, error.message) == (Status.UNAVAILABLE, "model 'tiny' is loading")
            assert error.retry_after is not None
            async with await routes.generate(ask()) as generation:
                assert generation.choice.route == "small"
                assert generation.choice.reason == "failover of chat: model 'chat' is loading"
            error = await refused(routes, ask(text=None, token_ids=[5]))
            assert error.status is Status.UNAVAILABLE
            with pytest.raises(ValueError, match="route 'small' is not one that waits"):
                routes.open(routes.services[0])
            routes.start_draining()
            assert {routes.state(name) for name in routes.names} == {RouteState.DRAINING}
            assert "shutting down" in (await refused(routes, ask())).message

    asyncio.run(main())


def test_a_route_whose_engine_has_failed_is_answered_for_by_its_fallback() -> None:
    async def main() -> None:
        devices: dict[str, FakeEngine] = {"chat": PacedEngine(fake_limits(), fail_at=2)}
        async with routed({"chat": "small", "small": None}, devices=devices) as routes:
            with pytest.raises(ServiceError) as caught:
                async for _ in await routes.generate(ask(params=ENDLESS)):
                    pass
            assert caught.value.status is Status.INTERNAL
            assert routes.state("chat") is RouteState.FAILED
            assert routes.failure is not None
            async with await routes.generate(ask()) as generation:
                assert generation.choice.route == "small"
                assert generation.choice.reason.startswith("failover of chat: the engine has failed")

    asyncio.run(main())


def test_an_abort_finds_its_request_on_any_route() -> None:
    async def main() -> None:
        async with routed(FALLBACKS) as routes:
            asked = ask(model="tiny", params=ENDLESS, request_id="mine", tenant="a")
            generation = await routes.generate(asked)
            assert not routes.abort("mine", "b")
            assert routes.abort("mine", "a")
            output = [delta async for delta in generation][-1].output
            assert output is not None
            assert output.outputs[0].finish_reason == "abort"

    asyncio.run(main())


def test_draining_waits_for_every_route() -> None:
    async def main() -> None:
        async with routed(FALLBACKS) as routes:

            async def read(generation: Generation) -> bool:
                return [delta async for delta in generation][-1].output is not None

            answers = [await routes.generate(ask(model=name)) for name in routes.names]
            readers = [asyncio.create_task(read(answer)) for answer in answers]
            assert await routes.drain(10.0)
            assert await asyncio.gather(*readers) == [True] * 3
            assert "shutting down" in (await refused(routes, ask())).message

    asyncio.run(main())


def test_a_model_s_own_defaults_hold_where_a_request_says_nothing() -> None:
    async def main() -> None:
        own = {"chat": {"temperature": 0.0, "top_k": 7, "max_tokens": 5}, "tiny": {"top_k": 3}}
        device = SlowEngine(fake_limits(num_slots=1))
        tiny = SlowEngine(fake_limits(num_slots=1))
        async with routed(
            {"chat": "tiny", "tiny": None}, defaults=own, devices={"chat": device, "tiny": tiny}
        ) as routes:
            params = SamplingParams(temperature=0.5, ignore_eos=True)
            absent = frozenset({"top_k", "max_tokens", "top_p"})
            generation = await routes.generate(ask(params=params, absent=absent))
            over = await routes.generate(ask(params=params, absent=absent, until_full=True))
            for stream in (generation, over):
                async for _ in stream:
                    pass
            _, receipt = generation.result()
            assert receipt.decoding == "sampled"  # The request's own temperature stands.
            (load,) = device.loads
            assert (load.params.temperature, load.params.top_k, load.params.max_tokens) == (0.5, 7, 5)
            (load,) = tiny.loads  # The answering model's defaults, not those of the one that was asked.
            assert (load.params.top_k, load.params.max_tokens) == (3, 126)

    asyncio.run(main())
