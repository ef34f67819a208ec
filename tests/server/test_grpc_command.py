"""`jaxserve serve`: what it refuses, and a small real model behind it."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import grpc.aio
import httpx
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2, vllm_engine_pb2_grpc

from jaxserve.plan import SamplingParams
from server.command import SERVE, Access, read_access
from server.core.tls import TlsFiles
from server.proto.jaxserve.v1 import engine_pb2 as pb
from server.proto.jaxserve.v1 import engine_pb2_grpc
from server.route_arguments import model_name

ROOT = Path(__file__).resolve().parents[2]
TLS = TlsFiles(certificate=Path("c"), key=Path("k"))
RUN = (
    "import argparse, sys; from server.command import SERVE; parser = argparse.ArgumentParser(); "
    "SERVE.add_arguments(parser); sys.exit(SERVE.run(parser.parse_args()))"
)
CHOSEN = ["model", "device", "precision", "pages", "prefixes", "policy", "slots", "ladder", "sampling"]
CHOSEN += ["manifest"]
"""What a server that is ready says of each model."""


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    SERVE.add_arguments(parser)
    return parser.parse_args(["model", *arguments])


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_the_loopback_needs_no_guard(host: str) -> None:
    access = Access(host=host, tls=None, tokens=None)
    assert access.on_loopback
    assert not access.guarded


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.1", "example.org"])
def test_the_world_needs_certificates_or_tokens(host: str) -> None:
    with pytest.raises(ValueError, match="is not the loopback"):
        Access(host=host, tls=None, tokens=None)
    assert Access(host=host, tls=TLS, tokens=None).guarded
    assert Access(host=host, tls=None, tokens={"token": "tenant"}).guarded


def test_files_of_certificates_and_tokens(tmp_path: Path) -> None:
    assert read_access(parse("--tls-cert", "c", "--tls-key", "k")).tls == TLS
    tokens = tmp_path / "tokens"
    tokens.write_text("tenant token\n")
    assert read_access(parse("--tokens", str(tokens), "--host", "0.0.0.0")).tokens == {"token": "tenant"}
    for arguments, words in (
        (("--tls-cert", "c"), "go together"),
        (("--tls-key", "k"), "go together"),
        (("--tls-client-ca", "a"), "needs --tls-cert"),
    ):
        with pytest.raises(ValueError, match=words):
            read_access(parse(*arguments))


def test_bad_arguments_are_refused_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="--max-waiting -1"):
        SERVE.run(parse("--max-waiting", "-1"))
    with pytest.raises(ValueError, match="--drain-seconds nan"):
        SERVE.run(parse("--drain-seconds", "nan"))
    with pytest.raises(SystemExit):
        parse("--grpc-port", "70000")
    assert "'70000' is no port" in capsys.readouterr().err


def test_a_model_is_called_by_the_last_part_of_its_path(tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    (tmp_path / "tiny.gguf").touch()
    assert model_name(str(tmp_path / "small")) == "small"
    assert model_name(str(tmp_path / "tiny.gguf")) == "tiny"
    assert model_name("owner/name") == "owner/name"


@pytest.mark.slow
def test_a_real_model_answers_alike_at_every_door(shared_data: Path, tmp_path: Path) -> None:
    model = shared_data / "models" / "stories260K" / "hf"
    prompt, count, log = "Once upon a time", 16, tmp_path / "requests.jsonl"

    async def answers(grpc_address: str, url: str) -> list[tuple[list[int], str]]:
        async with (
            grpc.aio.insecure_channel(grpc_address) as channel,
            httpx.AsyncClient(base_url=url) as http,
        ):
            params = pb.SamplingParams(temperature=0.8, seed=7, max_tokens=count)
            stub = engine_pb2_grpc.EngineStub(channel)
            native = [r async for r in stub.Generate(pb.GenerateRequest(text=prompt, params=params))]
            text = "".join(r.delta.text for r in native)
            streamed = [token for r in native for token in r.delta.token_ids]
            asked = vllm_engine_pb2.GenerateRequest(
                text=prompt,
                sampling_params=vllm_engine_pb2.SamplingParams(temperature=0.8, seed=7, max_tokens=count),
            )
            vllm = [r async for r in vllm_engine_pb2_grpc.VllmEngineStub(channel).Generate(asked)]
            body = {"prompt": prompt, "temperature": 0.8, "seed": 7, "max_tokens": count}
            completion = (await http.post("/v1/completions", json={"model": "hf"} | body)).json()
            small = (await http.post("/v1/completions", json={"model": "small"} | body)).json()
            assert small["usage"]["completion_tokens"] == count
            assert native[-1].final.receipt.kv_format == "float32"
            info = await stub.GetModelInfo(pb.GetModelInfoRequest(model="small"))
            metrics = (await http.get("/metrics")).text.splitlines()
            for name in ("hf", "small"):
                assert f'jaxserve:compiles_after_ready_total{{model_name="{name}"}} 0.0' in metrics
            assert (info.kv_format, info.model_fingerprint) == (
                "int8",
                native[-1].final.receipt.model_fingerprint,
            )
            return [
                (streamed, text),
                (list(vllm[-1].complete.output_ids), text),
                (streamed, completion["choices"][0]["text"]),
            ]

    async def main() -> tuple[list[str], list[tuple[list[int], str]]]:
        arguments = [
            str(model),
            "--grpc-port",
            "0",
            "--http-port",
            "0",
            "--num-slots",
            "2",
            "--route",
            f"small={model},kv=int8,slots=1,fallback=hf",
        ]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-c", RUN, *arguments, "--max-chunk", "16", "--request-log", str(log)),
            cwd=ROOT,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        try:
            lines = [(await process.stdout.readline()).decode().rstrip() for _ in range(24)]
            found = await answers(lines[0].split()[1], lines[1].split()[1])
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()
            await process.communicate()
        return lines, found

    from jaxserve import LLM

    lines, found = asyncio.run(main())
    assert [line.split()[0] for line in lines] == [
        "grpc",
        "http",
        "access",
        *CHOSEN,
        *CHOSEN,
        "ready",
    ]
    assert lines[13].startswith("model     small is hf (llama, ")
    assert lines[13].endswith(", overflow to hf")
    with LLM(str(model), num_slots=2, max_chunk=16) as llm:
        (output,) = llm.generate(prompt, SamplingParams(temperature=0.8, seed=7, max_tokens=count))
    assert found == [(output.outputs[0].token_ids, output.outputs[0].text)] * 3
    written = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["receipt"]["route"] for line in written] == ["hf", "hf", "hf", "small"]
    assert {line["completion_tokens"] for line in written} == {count}
