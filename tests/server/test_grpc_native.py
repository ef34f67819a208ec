"""The native gRPC service over the loopback, driven by its generated client."""

from __future__ import annotations

import asyncio
from dataclasses import fields
from typing import Any

import grpc
import pytest

from jaxserve.plan import SamplingParams
from jaxserve.version import __version__
from server.core import Status
from server.grpc_server.native_messages import read_params
from server.grpc_server.status import GRPC_CODES, RETRY_METADATA
from server.proto.jaxserve.v1 import engine_pb2 as pb
from tests.fake_engine import FakeEngine
from tests.fake_model import fake_limits
from tests.server.grpc_harness import failure, grpc_serving, streamed_ids
from tests.server.harness import ENDLESS, GREEDY, IDENTITY, TOKENIZER, SlowEngine, expected

CHAT = pb.Conversation(messages=[pb.ChatMessage(role="user", content="hi")])


def params(base: SamplingParams = GREEDY, **further: Any) -> pb.SamplingParams:
    return pb.SamplingParams(
        temperature=base.temperature, max_tokens=base.max_tokens, ignore_eos=base.ignore_eos, **further
    )


def request(text: str = "hello", base: SamplingParams = GREEDY, **further: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=text, params=params(base), **further)


def test_every_status_has_the_grpc_code_of_its_name() -> None:
    assert {status: code.name for status, code in GRPC_CODES.items()} == {
        status: status.name for status in Status
    }


def test_the_protocol_has_every_parameter_of_the_library_and_no_other() -> None:
    names = {field.name for field in pb.SamplingParams.DESCRIPTOR.fields}
    assert names == {field.name for field in fields(SamplingParams)}
    assert read_params(pb.SamplingParams()) == SamplingParams()


def test_parameters_arrive_as_they_were_given() -> None:
    message = pb.SamplingParams(
        n=2,
        temperature=0.5,
        top_k=-1,
        top_p=0.25,
        min_p=0.0,
        repetition_penalty=1.5,
        presence_penalty=-1.0,
        frequency_penalty=1.0,
        logit_bias={7: -2.5},
        allowed_token_ids=pb.TokenIds(ids=[7, 8]),
        bad_token_ids=[9],
        min_tokens=1,
        max_tokens=3,
        ignore_eos=True,
        stop_token_ids=[8],
        stop=["a", "b"],
        include_stop_str_in_output=True,
        seed=-5,
        logprobs=0,
        prompt_logprobs=2,
        skip_special_tokens=False,
    )
    assert read_params(message) == SamplingParams(
        n=2,
        temperature=0.5,
        top_k=-1,
        top_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=-1.0,
        frequency_penalty=1.0,
        logit_bias={7: -2.5},
        allowed_token_ids=[7, 8],
        bad_token_ids=(9,),
        min_tokens=1,
        max_tokens=3,
        ignore_eos=True,
        stop_token_ids=(8,),
        stop=("a", "b"),
        include_stop_str_in_output=True,
        seed=-5,
        logprobs=0,
        prompt_logprobs=2,
        skip_special_tokens=False,
    )


def test_a_stream_ends_with_one_final_message() -> None:
    async def main() -> None:
        async with grpc_serving() as served:
            responses = [r async for r in served.native.Generate(request(request_id="mine"))]
            assert streamed_ids(responses, "delta") == expected("hello", GREEDY)
            assert [r.HasField("final") for r in responses] == [False] * (len(responses) - 1) + [True]
            final = responses[-1].final
            assert final.request_id == "mine"
            (sample,) = final.samples
            assert sample.finish_reason == pb.FINISH_REASON_LENGTH
            assert sample.WhichOneof("matched_stop") is None
            assert not sample.HasField("cumulative_logprob")
            assert (final.usage.prompt_tokens, final.usage.completion_tokens) == (6, 12)
            assert final.usage.cached_tokens == 0
            timings = final.timings
            assert 0 <= timings.queue <= timings.first_token <= timings.total
            assert timings.queue + timings.prefill == pytest.approx(timings.first_token)
            assert timings.first_token + 11 * timings.per_token == pytest.approx(timings.total)
            receipt = final.receipt
            assert receipt.model_fingerprint == IDENTITY.fingerprint
            assert receipt.tokenizer_fingerprint == IDENTITY.tokenizer_fingerprint
            assert (receipt.model, receipt.precision, receipt.kv_format) == ("fake", "float32", "int8")
            assert (receipt.decoding, receipt.engine_version) == ("greedy", __version__)

    asyncio.run(main())


def test_text_ids_and_conversation_and_the_seed_that_was_drawn() -> None:
    async def main() -> None:
        async with grpc_serving() as served:
            sampled = pb.SamplingParams(max_tokens=8, ignore_eos=True)
            ids = pb.TokenIds(ids=TOKENIZER.encode("hello"))
            first = [
                r async for r in served.native.Generate(pb.GenerateRequest(text="hello", params=sampled))
            ]
            sampled.seed = first[-1].final.receipt.seed
            assert first[-1].final.receipt.decoding == "sampled"
            again = pb.GenerateRequest(token_ids=ids, params=sampled)
            second = [r async for r in served.native.Generate(again)]
            assert streamed_ids(first, "delta") == streamed_ids(second, "delta")
            chat = pb.GenerateRequest(conversation=CHAT, params=params())
            third = [r async for r in served.native.Generate(chat)]
            assert third[-1].final.usage.prompt_tokens == len("[user]hi[assistant]")
            bare = pb.GenerateRequest(text="hello", add_special_tokens=False, params=params())
            fourth = [r async for r in served.native.Generate(bare)]
            assert fourth[-1].final.usage.prompt_tokens == 5

    asyncio.run(main())


def test_samples_logprobs_and_stops_arrive() -> None:
    async def main() -> None:
        answer = expected("hello", ENDLESS)
        asked = pb.GenerateRequest(
            text="hello",
            params=params(ENDLESS, n=2, logprobs=2, prompt_logprobs=1, stop_token_ids=[answer[4]]),
        )
        async with grpc_serving() as served:
            responses = [r async for r in served.native.Generate(asked)]
            num_tokens = answer.index(answer[4]) + 1
            for index in (0, 1):
                assert streamed_ids(responses, "delta", index) == answer[:num_tokens]
            deltas = [r.delta for r in responses if r.HasField("delta") and r.delta.index == 0]
            at = [position for delta in deltas for position in delta.logprobs]
            assert [position.entries[0].token_id for position in at] == answer[:num_tokens]
            assert all(2 <= len(position.entries) <= 3 for position in at)
            assert at[0].entries[0].text == TOKENIZER.token_text(answer[0])
            prompt = deltas[0].prompt_logprobs
            assert [len(position.entries) > 0 for position in prompt] == [False] + [True] * 5
            assert not any(delta.prompt_logprobs for delta in deltas[1:])
            for sample in responses[-1].final.samples:
                assert sample.finish_reason == pb.FINISH_REASON_STOP
                assert sample.stop_token_id == answer[4]
                total = sum(position.entries[0].logprob for position in at)
                assert sample.cumulative_logprob == pytest.approx(total)

    asyncio.run(main())


def test_a_stop_string_is_named() -> None:
    async def main() -> None:
        text = TOKENIZER.decode(expected("hello", ENDLESS))
        stop = next(c for c in text if c.isascii() and c.isprintable())
        asked = pb.GenerateRequest(text="hello", params=params(ENDLESS, stop=[stop]))
        async with grpc_serving() as served:
            responses = [r async for r in served.native.Generate(asked)]
            assert responses[-1].final.samples[0].stop_string == stop
            assert "".join(r.delta.text for r in responses) == text.partition(stop)[0]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("message", "code", "words"),
    [
        (pb.GenerateRequest(), "INVALID_ARGUMENT", "exactly one"),
        (pb.GenerateRequest(text="x", params=pb.SamplingParams(top_p=0.0)), "INVALID_ARGUMENT", "top_p"),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[999])), "INVALID_ARGUMENT", "999"),
        (pb.GenerateRequest(token_ids=pb.TokenIds()), "INVALID_ARGUMENT", "empty"),
        (request(model="other"), "NOT_FOUND", "'other'"),
        (request(priority_class="gold"), "INVALID_ARGUMENT", "gold"),
        (request(deadline_seconds=-1.0), "DEADLINE_EXCEEDED", "passed"),
        (request(cache=pb.CacheOptions(namespace="")), "INVALID_ARGUMENT", "namespace"),
        (request(cache=pb.CacheOptions(namespace="n" * 257)), "INVALID_ARGUMENT", "256"),
        (request(fallback_route="x"), "NOT_FOUND", "'x'"),
    ],
)
def test_refusals_have_a_status_and_a_sentence(message: pb.GenerateRequest, code: str, words: str) -> None:
    async def main() -> None:
        async with grpc_serving() as served:
            error = await failure(served.native.Generate(message))
            assert error.code().name == code
            assert words in (error.details() or "")
            harmless = request(cache=pb.CacheOptions(read=False, write=False), priority_class="default")
            assert [r async for r in served.native.Generate(harmless)][-1].HasField("final")

    asyncio.run(main())


def test_a_full_queue_says_when_to_return() -> None:
    async def main() -> None:
        async with grpc_serving(SlowEngine(fake_limits()), max_waiting=0) as served:
            calls = [served.native.Generate(request(base=ENDLESS)) for _ in range(4)]
            for call in calls:
                await call.read()
            error = await failure(served.native.Generate(request()))
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert dict(error.trailing_metadata())[RETRY_METADATA] == "1000"
            for call in calls:
                call.cancel()

    asyncio.run(main())


@pytest.mark.parametrize("way", ["cancel", "disconnect"])
def test_a_client_that_goes_frees_its_pages_within_a_step(way: str) -> None:
    async def main() -> None:
        async with grpc_serving(SlowEngine(fake_limits())) as served:
            call = served.native.Generate(request(base=ENDLESS))
            await call.read()
            if way == "cancel":
                call.cancel()
            else:
                await served.channel.close()
            while served.service.engine.num_open:
                await asyncio.sleep(0.001)
            assert served.loop.snapshot().num_sampled < 30
            while not served.loop.idle:
                await asyncio.sleep(0.001)
            served.loop.check_integrity()
            assert served.service.statistics.num_failed == {Status.CANCELLED: 1}

    asyncio.run(main())


@pytest.mark.parametrize("whose", ["call", "message"])
def test_deadlines_of_the_call_and_of_the_message(whose: str) -> None:
    async def main() -> None:
        async with grpc_serving(SlowEngine(fake_limits())) as served:
            if whose == "call":
                call = served.native.Generate(request(base=ENDLESS), timeout=0.05)
            else:
                call = served.native.Generate(request(base=ENDLESS, deadline_seconds=0.05))
            assert (await failure(call)).code() is grpc.StatusCode.DEADLINE_EXCEEDED
            while served.service.engine.num_open:
                await asyncio.sleep(0.001)

    asyncio.run(main())


def test_an_abort_ends_the_stream_as_an_answer() -> None:
    async def main() -> None:
        async with grpc_serving(SlowEngine(fake_limits())) as served:
            stream = aiter(served.native.Generate(request(base=ENDLESS, request_id="mine")))
            await anext(stream)
            asked = pb.AbortRequest(request_ids=["mine", "unknown", "mine"])
            assert (await served.native.Abort(asked)).aborted == ["mine"]
            final = [r async for r in stream][-1].final
            assert final.samples[0].finish_reason == pb.FINISH_REASON_ABORT
            assert final.samples[0].completion_tokens < 100

    asyncio.run(main())


def test_a_batch_brings_each_result_once_and_errors_stay_alone() -> None:
    async def main() -> None:
        texts = [f"prompt {number}" for number in range(9)]
        batch = pb.GenerateBatchRequest(requests=[request(text) for text in texts])
        batch.requests[3].params.top_p = 7.0
        async with grpc_serving(max_waiting=0) as served:
            results = {r.index: r async for r in served.native.GenerateBatch(batch)}
            assert sorted(results) == list(range(9))
            assert results[3].error.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
            assert "top_p" in results.pop(3).error.message
            for index, result in results.items():
                (sample,) = result.answer.samples
                assert list(sample.token_ids) == expected(texts[index], GREEDY)
                assert sample.text == TOKENIZER.decode(sample.token_ids)
                assert result.answer.final.usage.completion_tokens == 12
            empty = await failure(served.native.GenerateBatch(pb.GenerateBatchRequest()))
            assert empty.code() is grpc.StatusCode.INVALID_ARGUMENT

    asyncio.run(main())


def test_a_batch_whose_client_goes_is_aborted_whole() -> None:
    async def main() -> None:
        batch = pb.GenerateBatchRequest(requests=[request("short"), *[request(base=ENDLESS)] * 8])
        async with grpc_serving() as served:
            call = served.native.GenerateBatch(batch)
            assert (await call.read()).index == 0
            call.cancel()
            while served.service.engine.num_open:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.02)
            assert served.service.engine.num_open == 0

    asyncio.run(main())


def test_tokens_there_and_back() -> None:
    async def main() -> None:
        async with grpc_serving() as served:
            native = served.native
            response = await native.Tokenize(pb.TokenizeRequest(text="héllo"))
            assert response.token_ids == TOKENIZER.encode("héllo")
            assert response.max_model_len == 128
            bare = await native.Tokenize(pb.TokenizeRequest(text="hello", add_special_tokens=False))
            assert len(bare.token_ids) == 5
            chat = await native.Tokenize(pb.TokenizeRequest(conversation=CHAT))
            assert chat.token_ids == TOKENIZER.apply_chat_template([{"role": "user", "content": "hi"}])
            text = await native.Detokenize(pb.DetokenizeRequest(token_ids=response.token_ids))
            assert text.text == "héllo"
            whole = pb.DetokenizeRequest(token_ids=response.token_ids, skip_special_tokens=False)
            assert (await native.Detokenize(whole)).text == "<s>héllo"
            for call in (
                native.Tokenize(pb.TokenizeRequest()),
                native.Detokenize(pb.DetokenizeRequest(token_ids=[500])),
            ):
                assert (await failure(call)).code() is grpc.StatusCode.INVALID_ARGUMENT
            missing = native.Tokenize(pb.TokenizeRequest(text="x", model="other"))
            assert (await failure(missing)).code() is grpc.StatusCode.NOT_FOUND

    asyncio.run(main())


def test_model_load_and_statistics() -> None:
    async def main() -> None:
        async with grpc_serving(SlowEngine(fake_limits())) as served:
            native = served.native
            info = await native.GetModelInfo(pb.GetModelInfoRequest())
            assert (info.model, info.vocab_size, info.max_model_len) == ("fake", 258, 128)
            assert (list(info.eos_token_ids), info.bos_token_id) == ([1], 0)
            assert info.HasField("bos_token_id")
            assert info.has_chat_template
            call = native.Generate(request(base=ENDLESS))
            for _ in range(10):
                await call.read()
            load = await native.GetLoad(pb.GetLoadRequest())
            assert (load.running, load.waiting, load.slots, load.pages) == (1, 0, 4, 256)
            assert load.free_pages < load.pages
            assert 0 < load.kv_usage < 0.2
            assert not load.draining
            call.cancel()
            assert [r async for r in native.Generate(request())]
            await failure(native.Generate(request(priority_class="other")))
            stats = await native.GetStats(pb.GetStatsRequest())
            assert dict(stats.finished) == {"length": 1}
            assert dict(stats.refused) == {"invalid_argument": 1}
            assert dict(stats.failed) == {"cancelled": 1}
            assert (stats.admitted, stats.prompt_tokens, stats.completion_tokens) == (2, 6, 12)
            assert stats.steps > 10

    asyncio.run(main())


def test_a_failing_device_ends_every_stream_as_internal() -> None:
    async def main() -> None:
        async with grpc_serving(FakeEngine(fake_limits(), fail_at=20)) as served:
            calls = [served.native.Generate(request(base=ENDLESS)) for _ in range(3)]
            calls.append(
                served.native.GenerateBatch(pb.GenerateBatchRequest(requests=[request(base=ENDLESS)] * 2))
            )
            for error in await asyncio.gather(*map(failure, calls)):
                assert error.code() is grpc.StatusCode.INTERNAL
                assert "device" not in (error.details() or "")

    asyncio.run(main())


def test_an_unforeseen_error_is_internal_and_only_the_log_knows_why(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with grpc_serving() as served:
            monkeypatch.setattr(served.service, "load", lambda: 1 // 0)
            error = await failure(served.native.GetLoad(pb.GetLoadRequest()))
            assert error.code() is grpc.StatusCode.INTERNAL
            assert "ZeroDivision" not in (error.details() or "")

    asyncio.run(main())
    assert "ZeroDivisionError" in caplog.text
