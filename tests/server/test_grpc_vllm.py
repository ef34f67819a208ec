"""`vllm.grpc.engine.VllmEngine` over the loopback, driven by the client that its package publishes."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from jaxserve.plan import SamplingParams
from server.grpc_server.tokenizer_archive import archive
from server.grpc_server.vllm_messages import read_params
from server.proto.jaxserve.v1 import engine_pb2 as native_pb
from tests.fake_model import fake_limits
from tests.server.grpc_harness import Served, failure, grpc_serving, streamed_ids
from tests.server.harness import ENDLESS, GREEDY, IDENTITY, TOKENIZER, SlowEngine, expected

PROMPT = TOKENIZER.encode("hello")


def request(
    base: SamplingParams = GREEDY, *, stream: bool = True, fields: dict[str, Any] | None = None, **params: Any
) -> pb.GenerateRequest:
    message = pb.GenerateRequest(
        tokenized=pb.TokenizedInput(original_text="hello", input_ids=PROMPT),
        stream=stream,
        sampling_params=pb.SamplingParams(
            **({"temperature": base.temperature, "max_tokens": base.max_tokens, "ignore_eos": True} | params)
        ),
    )
    message.MergeFrom(pb.GenerateRequest(**(fields or {})))
    return message


async def generate(served: Served, message: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    return [response async for response in served.vllm.Generate(message)]


def test_zeros_of_fields_without_presence_are_no_values() -> None:
    assert read_params(pb.SamplingParams()) == SamplingParams(skip_special_tokens=False)
    assert read_params(pb.SamplingParams(temperature=0.0, seed=0, logprobs=0)) == SamplingParams(
        temperature=0.0, seed=0, logprobs=0, skip_special_tokens=False
    )
    given = pb.SamplingParams(
        temperature=0.5,
        top_p=0.25,
        top_k=3,
        min_p=0.5,
        frequency_penalty=1.0,
        presence_penalty=-1.0,
        repetition_penalty=2.0,
        max_tokens=9,
        min_tokens=2,
        stop=["x"],
        stop_token_ids=[4],
        skip_special_tokens=True,
        ignore_eos=True,
        n=3,
        logprobs=1,
        prompt_logprobs=2,
        seed=-7,
        include_stop_str_in_output=True,
        logit_bias={5: 1.5},
    )
    assert read_params(given) == SamplingParams(
        temperature=0.5,
        top_p=0.25,
        top_k=3,
        min_p=0.5,
        frequency_penalty=1.0,
        presence_penalty=-1.0,
        repetition_penalty=2.0,
        max_tokens=9,
        min_tokens=2,
        stop=("x",),
        stop_token_ids=(4,),
        ignore_eos=True,
        n=3,
        logprobs=1,
        prompt_logprobs=2,
        seed=-7,
        include_stop_str_in_output=True,
        logit_bias={5: 1.5},
    )


def test_streamed_and_whole_and_native_are_the_same_answer() -> None:
    async def main() -> None:
        async with grpc_serving() as served:
            streamed = await generate(served, request())
            answer = expected("hello", GREEDY)
            assert streamed_ids(streamed, "chunk") == answer
            last_chunk, complete = streamed[-2].chunk, streamed[-1].complete
            assert (last_chunk.prompt_tokens, last_chunk.completion_tokens) == (6, 12)
            assert (complete.prompt_tokens, complete.completion_tokens) == (6, 12)
            assert list(complete.output_ids) == answer
            assert complete.finish_reason == "length"
            assert complete.WhichOneof("matched_stop") is None
            (whole,) = await generate(served, request(stream=False))
            assert (complete.cached_tokens, whole.complete.cached_tokens) == (0, 5)
            complete.cached_tokens = 5
            assert whole.complete == complete
            text = pb.GenerateRequest(text="hello", sampling_params=request().sampling_params)
            assert (await generate(served, text))[-1].complete == complete
            native = native_pb.GenerateRequest(
                text="hello",
                params=native_pb.SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
            )
            assert streamed_ids([r async for r in served.native.Generate(native)], "delta") == answer

    asyncio.run(main())


def test_samples_logprobs_and_stops() -> None:
    async def main() -> None:
        answer = expected("hello", ENDLESS)
        count = answer.index(answer[5]) + 1
        async with grpc_serving() as served:
            message = request(ENDLESS, n=2, logprobs=2, prompt_logprobs=2, stop_token_ids=[answer[5]])
            responses = await generate(served, message)
            for index in (0, 1):
                assert streamed_ids(responses, "chunk", index) == answer[:count]
                complete = responses[index - 2].complete
                assert (complete.index, complete.finish_reason) == (index, "stop")
                assert complete.matched_token_id == answer[5]
                assert list(complete.output_logprobs.token_ids) == answer[:count]
                assert len(complete.output_logprobs.token_logprobs) == count
                assert [len(top.values) for top in complete.output_logprobs.top_logprobs] == [2] * count
            prompt = next(r.chunk for r in responses if r.chunk.index == 0).input_logprobs
            assert list(prompt.token_ids) == PROMPT
            present = [value.HasField("value") for value in prompt.token_logprobs]
            assert present == [False] + [True] * 5
            assert [len(top.values) for top in prompt.top_logprobs] == [0] + [2] * 5
            none = await generate(served, request())
            assert not none[-1].complete.HasField("output_logprobs")

    asyncio.run(main())


def test_a_matched_stop_string_and_an_answer_without_a_limit() -> None:
    async def main() -> None:
        text = TOKENIZER.decode(expected("hello", ENDLESS))
        stop = next(c for c in text if c.isascii() and c.isprintable())
        async with grpc_serving() as served:
            complete = (await generate(served, request(ENDLESS, stop=[stop])))[-1].complete
            assert complete.matched_stop_str == stop
            unlimited = request()
            unlimited.sampling_params.ClearField("max_tokens")
            full = (await generate(served, unlimited))[-1].complete
            assert (full.finish_reason, full.completion_tokens) == ("length", 128 - 6)

    asyncio.run(main())


def test_prompts_are_cut_from_the_left() -> None:
    async def main() -> None:
        async with grpc_serving() as served:
            cut = (await generate(served, request(truncate_prompt_tokens=2)))[-1].complete
            assert cut.prompt_tokens == 2
            short = pb.GenerateRequest(
                tokenized=pb.TokenizedInput(input_ids=PROMPT[-2:]), sampling_params=request().sampling_params
            )
            assert (await generate(served, short))[-1].complete.output_ids == cut.output_ids
            long = request(max_tokens=1, truncate_prompt_tokens=-1)
            long.tokenized.input_ids[:] = PROMPT * 50
            assert (await generate(served, long))[-1].complete.prompt_tokens == 127
            error = await failure(served.vllm.Generate(request(truncate_prompt_tokens=0)))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT

    asyncio.run(main())


@pytest.mark.parametrize(
    ("message", "code", "words"),
    [
        (request(fields={"mm_inputs": pb.MultimodalInputs()}), "UNIMPLEMENTED", "images"),
        (request(fields={"extra_mm_inputs": [pb.MultimodalInputs()]}), "UNIMPLEMENTED", "images"),
        (request(fields={"kv_transfer_params_json": "{}"}), "UNIMPLEMENTED", "prefill"),
        (request(fields={"data_parallel_rank": 1}), "INVALID_ARGUMENT", "rank 0"),
        (request(top_p=1.5), "INVALID_ARGUMENT", "top_p"),
        (request(logprobs=-1), "INVALID_ARGUMENT", "logprobs"),
        (pb.GenerateRequest(), "INVALID_ARGUMENT", "exactly one"),
    ],
)
def test_refusals_have_a_status_and_a_sentence(message: pb.GenerateRequest, code: str, words: str) -> None:
    async def main() -> None:
        async with grpc_serving() as served:
            error = await failure(served.vllm.Generate(message))
            assert error.code().name == code
            assert words in (error.details() or "")

    asyncio.run(main())


def test_abort_and_cancel() -> None:
    async def main() -> None:
        async with grpc_serving(SlowEngine(fake_limits())) as served:
            stream = aiter(served.vllm.Generate(request(ENDLESS, fields={"request_id": "mine"})))
            await anext(stream)
            await served.vllm.Abort(pb.AbortRequest(request_ids=["mine", "unknown"]))
            complete = [response async for response in stream][-1].complete
            assert complete.finish_reason == "abort"
            assert complete.completion_tokens < 100
            call = served.vllm.Generate(request(ENDLESS))
            await call.read()
            call.cancel()
            while served.service.engine.num_open:
                await asyncio.sleep(0.001)

    asyncio.run(main())


def test_model_server_load_and_health() -> None:
    async def main() -> None:
        async with grpc_serving(SlowEngine(fake_limits())) as served:
            vllm = served.vllm
            model = await vllm.GetModelInfo(pb.GetModelInfoRequest())
            assert (model.served_model_name, model.model_path) == ("fake", IDENTITY.path)
            assert (model.max_context_length, model.max_req_input_len, model.vocab_size) == (128, 127, 258)
            assert list(model.eos_token_ids) == [1]
            assert model.is_generation
            call = vllm.Generate(request(ENDLESS))
            for _ in range(5):
                await call.read()
            server = await vllm.GetServerInfo(pb.GetServerInfoRequest())
            assert (server.active_requests, server.max_num_seqs, server.block_size) == (1, 4, 4)
            assert (server.kv_cache_dtype, server.model_dtype) == ("int8", "float32")
            (load,) = (await vllm.GetLoads(pb.GetLoadsRequest())).loads
            assert (load.num_running_reqs, load.num_waiting_reqs, load.max_running_requests) == (1, 0, 4)
            assert 0 < load.num_used_tokens < load.max_total_num_tokens == 256 * 4
            call.cancel()
            wrong = await failure(vllm.GetLoads(pb.GetLoadsRequest(dp_rank=1)))
            assert wrong.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert (await vllm.HealthCheck(pb.HealthCheckRequest())).healthy
            served.service.start_draining()
            health = await vllm.HealthCheck(pb.HealthCheckRequest())
            assert (health.healthy, health.message) == (False, "draining")

    asyncio.run(main())


def test_a_gateway_can_build_the_tokenizer(tmp_path: Path) -> None:
    async def main() -> bytes:
        async with grpc_serving() as served:
            request = common_pb2.GetTokenizerRequest()
            parts = [chunk async for chunk in served.vllm.GetTokenizer(request)]
            data = b"".join(part.data for part in parts)
            assert [part.sha256 for part in parts[:-1]] == [""] * (len(parts) - 1)
            assert parts[-1].sha256 == hashlib.sha256(data).hexdigest()
            return data

    with zipfile.ZipFile(io.BytesIO(asyncio.run(main()))) as found:
        assert found.read("tokenizer.json").decode() == TOKENIZER.backend.to_str()
        config = json.loads(found.read("tokenizer_config.json"))
        assert config["chat_template"] == TOKENIZER.chat_templates["default"]
        assert config["bos_token"] == "<s>"
    (tmp_path / "tokenizer.json").write_text("{}")
    with zipfile.ZipFile(io.BytesIO(archive(TOKENIZER, tmp_path))) as found:
        assert found.namelist() == ["tokenizer.json"]
        assert found.read("tokenizer.json") == b"{}"
    assert archive(TOKENIZER, tmp_path) == archive(TOKENIZER, tmp_path)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("Embed", pb.EmbedRequest()),
        ("StartProfile", common_pb2.StartProfileRequest()),
        ("StopProfile", common_pb2.StopProfileRequest()),
    ],
)
def test_what_is_not_there_says_so(method: str, message: Any) -> None:
    async def main() -> None:
        async with grpc_serving() as served:
            error = await failure(getattr(served.vllm, method)(message))
            assert error.code() is grpc.StatusCode.UNIMPLEMENTED
            assert "this server" in (error.details() or "")

    asyncio.run(main())


def test_a_seed_is_the_same_answer_through_both_services() -> None:
    async def main() -> None:
        sampled = replace(GREEDY, temperature=1.0)
        async with grpc_serving() as served:
            theirs = streamed_ids(await generate(served, request(sampled, seed=42)), "chunk")
            native = native_pb.GenerateRequest(
                text="hello",
                params=native_pb.SamplingParams(max_tokens=12, ignore_eos=True, seed=42),
            )
            ours = streamed_ids([r async for r in served.native.Generate(native)], "delta")
            assert theirs == ours == expected("hello", sampled, seed=42)

    asyncio.run(main())
