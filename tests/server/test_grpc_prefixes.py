"""Prefix reuse over gRPC: the same answers, who shares with whom, flushing, and what routers hear."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2

from server.proto.jaxserve.v1 import engine_pb2 as pb
from tests.server.grpc_harness import Served, failure, grpc_serving
from tests.server.harness import TOKENIZER, serving

PROMPT = "the same beginning of everything, "
NUM_PROMPT = len(TOKENIZER.encode(PROMPT))
PAGE = 4


def request(text: str = PROMPT, **fields: Any) -> pb.GenerateRequest:
    params = pb.SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=2)
    return pb.GenerateRequest(text=text, params=params, **fields)


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


async def generate(served: Served, asked: pb.GenerateRequest, **call: Any) -> tuple[list[Any], pb.Final]:
    """What one sample says, as positions of tokens and log-probabilities, and the end."""
    responses = [one async for one in served.native.Generate(asked, **call)]
    said = [entry for r in responses for at in r.delta.logprobs for entry in at.entries]
    return [(one.token_id, one.logprob, one.rank) for one in said], responses[-1].final


async def cached(served: Served, asked: pb.GenerateRequest, **call: Any) -> int:
    _, final = await generate(served, asked, **call)
    assert final.usage.cached_tokens == final.receipt.reused_tokens
    return final.usage.cached_tokens


def test_a_warm_answer_is_the_cold_one_and_its_receipt_says_so() -> None:
    async def main() -> None:
        async with grpc_serving() as served:
            cold, first = await generate(served, request())
            warm, second = await generate(served, request())
            assert warm == cold != []
            assert (first.usage.cached_tokens, first.receipt.cache_path) == (0, "cold")
            assert NUM_PROMPT - PAGE <= second.usage.cached_tokens < NUM_PROMPT
            assert second.receipt.cache_path == "warm"
            assert second.receipt.priority_class == "default"
            stats = await served.native.GetStats(pb.GetStatsRequest())
            assert stats.cached_tokens == stats.prefixes.hit_tokens == second.usage.cached_tokens
            assert stats.prefixes.query_tokens >= 2 * NUM_PROMPT - 2
            assert stats.prefixes.stored_pages > 0

    asyncio.run(main())


def test_vllms_protocol_has_the_same_answer_and_count() -> None:
    async def main() -> None:
        async with grpc_serving() as served:
            _, final = await generate(served, request())
            params = vllm_engine_pb2.SamplingParams(
                temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=2
            )
            asked = vllm_engine_pb2.GenerateRequest(request_id="x", text=PROMPT, sampling_params=params)
            ends: list[Any] = []
            for _ in range(2):
                (response,) = [one async for one in served.vllm.Generate(asked)]
                ends.append(response.complete)
            assert final.usage.cached_tokens == 0
            assert ends[0].cached_tokens >= NUM_PROMPT - PAGE
            assert ends[0].SerializeToString() == ends[1].SerializeToString()
            (load,) = (await served.vllm.GetLoads(vllm_engine_pb2.GetLoadsRequest())).loads
            assert 0 < load.cache_hit_rate < 1

    asyncio.run(main())


def test_tenants_share_nothing_but_what_they_name() -> None:
    async def main() -> None:
        async with grpc_serving(tokens={"a-token": "a", "b-token": "b"}) as served:
            a, b = ({"metadata": bearer(token)} for token in ("a-token", "b-token"))
            assert await cached(served, request(), **a) == 0
            assert await cached(served, request(), **b) == 0
            assert await cached(served, request(), **b) > 0
            shared = request(cache=pb.CacheOptions(namespace="a"))  # A namespace is never a tenant.
            assert await cached(served, shared, **a) == 0
            assert await cached(served, shared, **b) > 0

    asyncio.run(main())


def test_a_request_may_neither_read_nor_write() -> None:
    async def main() -> None:
        async with grpc_serving() as served:
            assert await cached(served, request(cache=pb.CacheOptions(write=False))) == 0
            assert await cached(served, request()) == 0
            _, unread = await generate(served, request(cache=pb.CacheOptions(read=False)))
            assert (unread.usage.cached_tokens, unread.receipt.cache_path) == (0, "off")
            assert await cached(served, request()) > 0

    asyncio.run(main())


def test_a_flush_forgets_a_tenant_a_namespace_or_all() -> None:
    async def main() -> None:
        async with grpc_serving() as served:
            mine, other, named = (
                request(tenant="me"),
                request(tenant="other"),
                request(cache=pb.CacheOptions(namespace="n")),
            )
            flush = served.native.FlushPrefixCache
            for asked in (mine, other, named):
                await cached(served, asked)
            assert (await flush(pb.FlushPrefixCacheRequest(tenant="me"))).pages >= NUM_PROMPT // PAGE
            assert [await cached(served, asked) > 0 for asked in (mine, other, named)] == [False, True, True]
            assert (await flush(pb.FlushPrefixCacheRequest(namespace="n"))).pages > 0
            assert [await cached(served, asked) > 0 for asked in (mine, other, named)] == [True, True, False]
            assert (await served.vllm.FlushCache(common_pb2.FlushCacheRequest())).success
            assert [await cached(served, asked) for asked in (mine, other, named)] == [0, 0, 0]
            unknown = await failure(flush(pb.FlushPrefixCacheRequest(model="other")))
            assert unknown.code() is grpc.StatusCode.NOT_FOUND

    asyncio.run(main())


def test_with_tokens_a_flush_reaches_the_callers_own() -> None:
    async def main() -> None:
        async with grpc_serving(tokens={"a-token": "a", "b-token": "b"}) as served:
            a, b = ({"metadata": bearer(token)} for token in ("a-token", "b-token"))
            await cached(served, request(), **a)
            await cached(served, request(), **b)
            await served.vllm.FlushCache(common_pb2.FlushCacheRequest(), **a)
            assert await cached(served, request(), **b) > 0
            assert await cached(served, request(), **a) == 0

    asyncio.run(main())


class Router:
    """Follows the stream as a gateway would: which pages of which text the server has."""

    def __init__(self, served: Served, start: int = 0, metadata: Any = None) -> None:
        self.pages: dict[int, list[int]] = {}
        self.salts: set[str] = set()
        self.numbers: list[int] = []
        self._start = start
        self._call = served.vllm.SubscribeKvEvents(
            common_pb2.SubscribeKvEventsRequest(start_sequence_number=start), metadata=metadata
        )

    async def read(self) -> Any:
        batch = await asyncio.wait_for(self._call.read(), 5)
        assert batch.dp_rank == 0
        self.numbers.append(batch.sequence_number)
        for event in batch.events:
            match event.WhichOneof("data"):
                case "stored":
                    self._store(event.stored)
                case "removed":
                    for key in event.removed.block_hashes:
                        self.pages.pop(key, None)
                case _:
                    self.pages.clear()
        return batch

    def _store(self, stored: Any) -> None:
        self.salts.add(stored.cache_salt)
        if stored.HasField("parent_block_hash") and not self._start:
            assert stored.parent_block_hash in self.pages
        self.pages |= {one.block_hash: list(one.token_ids) for one in stored.blocks}

    async def read_to(self, number: int) -> None:
        while not self.numbers or self.numbers[-1] < number:
            await self.read()

    def close(self) -> None:
        self._call.cancel()


def test_a_router_hears_what_is_cached_from_the_start_or_later() -> None:
    async def main() -> None:
        async with grpc_serving() as served:
            log = served.service.engine.kv_events
            assert log is not None
            early = Router(served)
            await cached(served, request())
            await early.read_to(log.last_sequence_number)
            assert early.numbers == list(range(1, log.last_sequence_number + 1))
            ids = TOKENIZER.encode(PROMPT)
            wanted = [ids[at : at + PAGE] for at in range(0, NUM_PROMPT - PAGE + 1, PAGE)]
            assert [page for page in early.pages.values() if page in wanted] == wanted
            late = Router(served)
            snapshot = (await late.read()).snapshot
            assert (snapshot.index, snapshot.count) == (0, 1)
            assert snapshot.blocks == len(late.pages)
            assert late.pages == early.pages
            resumed = Router(served, start=log.last_sequence_number)
            await resumed.read()
            assert resumed.numbers == [log.last_sequence_number]
            await served.vllm.FlushCache(common_pb2.FlushCacheRequest())
            for router in (early, late):
                await router.read_to(log.last_sequence_number)
                assert router.pages == {}
            for router in (early, late, resumed):
                router.close()

    asyncio.run(main())


def test_a_router_from_another_life_starts_over() -> None:
    async def main() -> None:
        async with grpc_serving() as served:
            await cached(served, request())
            router = Router(served, start=10_000)
            batch = await router.read()
            assert batch.HasField("snapshot")
            assert batch.events[0].HasField("cleared")
            assert len(router.pages) >= NUM_PROMPT // PAGE
            router.close()

    asyncio.run(main())


def test_with_tokens_a_router_hears_of_its_own_tenant_alone() -> None:
    async def main() -> None:
        async with grpc_serving(tokens={"a-token": "a", "b-token": "b"}) as served:
            a, b = ({"metadata": bearer(token)} for token in ("a-token", "b-token"))
            log = served.service.engine.kv_events
            assert log is not None
            router = Router(served, metadata=bearer("a-token"))
            await cached(served, request(), **b)
            await router.read_to(log.last_sequence_number)
            assert router.pages == {}
            await cached(served, request(), **a)
            await router.read_to(log.last_sequence_number)
            assert router.pages
            assert router.salts == {""}
            router.close()

    asyncio.run(main())


def test_without_tokens_other_scopes_are_told_apart_by_their_salt() -> None:
    async def main() -> None:
        async with grpc_serving() as served:
            log = served.service.engine.kv_events
            assert log is not None
            router = Router(served)
            await cached(served, request(cache=pb.CacheOptions(namespace="n")))
            await cached(served, request(tenant="t"))
            await router.read_to(log.last_sequence_number)
            assert router.salts == {"n", "tenant:t"}
            router.close()

    asyncio.run(main())


def test_a_subscription_ends_when_the_server_drains() -> None:
    async def main() -> None:
        async with grpc_serving() as served:
            call = served.vllm.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())
            await asyncio.sleep(0.05)
            served.service.start_draining()
            assert [one async for one in call] == []

    asyncio.run(main())


@pytest.mark.parametrize("method", ["SubscribeKvEvents", "FlushCache"])
def test_a_server_that_reuses_nothing_says_so(method: str) -> None:
    async def main() -> None:
        async with grpc_serving(open_service=lambda: serving(prefix_cache=False)) as served:
            _, final = await generate(served, request())
            assert final.receipt.cache_path == "off"
            if method == "FlushCache":
                answer = await served.vllm.FlushCache(common_pb2.FlushCacheRequest())
                assert answer.message.startswith("0 pages")
            else:
                call = served.vllm.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())
                assert (await failure(call)).code() is grpc.StatusCode.UNIMPLEMENTED
            stats = await served.native.GetStats(pb.GetStatsRequest())
            assert not stats.HasField("prefixes")

    asyncio.run(main())
