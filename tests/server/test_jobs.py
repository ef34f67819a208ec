"""A server of several processes: the answers of one, and its end when either is lost."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import grpc.aio
import pytest

from jaxserve import LLM, SamplingParams
from tests.server.job_harness import (
    ENDS_WITHIN,
    MAX_MODEL_LEN,
    PROMPT,
    last_words,
    request,
    serving,
    tokens_of,
)
from tests.sharding.jobs import ROOT, WAIT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("mesh", ["tensor=2", "pipe=2", "tensor=2,pipe=2", "data=2,tensor=2"])
def test_it_answers_as_one_process_and_drains(shared_data: Path, mesh: str) -> None:
    folder = shared_data / "models/stories260K/hf"
    with LLM(folder, num_slots=2, max_model_len=MAX_MODEL_LEN, max_chunk=16, progress=False) as llm:
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        expected = llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].token_ids

    async def main() -> None:
        async with serving(folder, mesh) as (members, stub):
            answers = await asyncio.gather(*(tokens_of(stub.Generate(request(24))) for _ in range(3)))
            assert answers == [list(expected)] * 3
            members[0].send_signal(signal.SIGTERM)
            assert [await asyncio.to_thread(member.wait, WAIT) for member in members] == [0] * len(members)

    asyncio.run(main())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("lost", [1, 0], ids=["follower", "leader"])
def test_the_loss_of_a_process_ends_the_job(shared_data: Path, lost: int, number: signal.Signals) -> None:
    async def main() -> None:
        async with serving(shared_data / "models/stories260K/hf") as (members, stub):
            call = aiter(stub.Generate(request(490)))
            await anext(call)
            left = members[1 - lost]
            started = time.monotonic()
            members[lost].send_signal(number)
            status = await asyncio.to_thread(left.wait, WAIT)
            assert time.monotonic() - started < ENDS_WITHIN
            assert status == 1
            if lost == 0:  # Its own clients hear of a dead leader from gRPC, of a stopped one from nobody.
                members[lost].kill()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await tokens_of(call)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            (line,) = last_words(left)
            assert f"process {lost}" in line
            assert line.endswith("; the job ends")

    asyncio.run(main())


OWN_NETWORK = ["unshare", "--user", "--map-root-user", "--net"]


def has_own_networks() -> bool:
    """Whether a process here may have a network that it can cut."""
    try:
        command = [*OWN_NETWORK, "ip", "link", "set", "lo", "up"]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not has_own_networks(), reason="only a network namespace can be cut: unshare and ip")
@pytest.mark.parametrize("mesh", ["tensor=2", "pipe=2"])
def test_a_cut_network_ends_both_processes(shared_data: Path, mesh: str) -> None:
    folder = shared_data / "models/stories260K/hf"
    command = [*OWN_NETWORK, sys.executable, "-m", "tests.server.cut_network", str(folder), mesh]
    process = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    told = json.loads(process.stdout)
    assert told["statuses"] == [1, 1]
    assert max(told["seconds"]) < ENDS_WITHIN
    assert told["client"] == "UNAVAILABLE"
    assert told["left"] == []
    for number, lines in enumerate(told["last_words"]):
        (line,) = lines
        assert f"process {1 - number}" in line.removeprefix(f"jaxserve: process {number} of 2: ")
        assert line.endswith("; the job ends")
