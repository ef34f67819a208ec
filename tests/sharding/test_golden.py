"""A trained model on several devices: through the library and a server, against transformers' answers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from server.proto.jaxserve.v1 import engine_pb2 as pb
from server.proto.jaxserve.v1 import engine_pb2_grpc
from tests.sharding.eight import EIGHT_DEVICES, report_of

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def cases(shared_data: Path) -> list[dict[str, Any]]:
    """Greedy answers, none of which rounding in float32 can change."""
    cases = json.loads((shared_data / "golden" / "stories260K.json").read_text())["cases"]
    assert min(margin for case in cases for margin in case["top2_margin"]) > 1e-3
    return cases


@pytest.mark.slow
def test_the_library_over_more_devices_than_experts_and_in_stages(
    shared_data: Path, cases: list[dict[str, Any]]
) -> None:
    # Equal to the dense model only if every slice of every expert is applied, with the right weight.
    model = shared_data / "models" / "stories260K_moe" / "split4_top4"
    asked = [(case["prompt_ids"], min(100, len(case["output_ids"]))) for case in cases]
    meshes = ["tensor=4,expert=2", "expert=2,pipe=2", "data=2"]
    report = report_of("tests.sharding.golden", str(model), *meshes, given=json.dumps(asked))
    expected = [case["output_ids"][:length] for case, (_, length) in zip(cases, asked, strict=True)]
    assert report == dict.fromkeys(meshes, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "prefill_mesh"), [("tensor=4", None), ("tensor=2,pipe=2", None), ("tensor=2", "tensor=4")]
)
def test_a_server_over_several_devices(
    shared_data: Path, cases: list[dict[str, Any]], mesh: str, prefill_mesh: str | None
) -> None:
    model, case = shared_data / "models" / "stories260K" / "hf", cases[1]
    arguments = ["--mesh", mesh, "--grpc-port", "0", "--num-slots", "1", "--max-chunk", "16"]
    if prefill_mesh is not None:
        arguments += ["--prefill-mesh", prefill_mesh]
    metrics: list[str] = []

    async def ask(address: str) -> list[int]:
        async with grpc.aio.insecure_channel(address) as channel:
            stub = engine_pb2_grpc.EngineStub(channel)
            params = pb.SamplingParams(temperature=0, max_tokens=40)
            # So long that it is worth to be computed apart.
            prompt = case["prompt_ids"] + case["output_ids"][:20]
            request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), params=params)
            stream = stub.Generate(request, wait_for_ready=True)
            tokens = [token async for reply in stream for token in reply.delta.token_ids]
            stats = await stub.GetStats(pb.GetStatsRequest(with_metrics=True))
            metrics.extend(stats.metrics.splitlines())
            return tokens

    async def main() -> tuple[list[str], list[int]]:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "jaxserve", "serve", str(model), *arguments),
            cwd=REPOSITORY,
            env=os.environ | EIGHT_DEVICES,
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        try:
            lines = [(await process.stdout.readline()).decode().rstrip()]
            while lines[-1] != "ready":
                lines.append((await process.stdout.readline()).decode().rstrip())
            found = await ask(lines[0].split()[1])
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()
            await process.communicate()
        return lines, found

    lines, found = asyncio.run(asyncio.wait_for(main(), 250))
    apart = "" if prefill_mesh is None else f"; prompts on {prefill_mesh}"
    assert f"device    cpu, {mesh}{apart}" in lines
    assert found == case["output_ids"][20:60]
    name = 'jaxserve:prefill_prompts_total{model_name="hf"} '
    told = [float(line.removeprefix(name)) for line in metrics if line.startswith(name)]
    assert told == [0.0 if prefill_mesh is None else 1.0]
