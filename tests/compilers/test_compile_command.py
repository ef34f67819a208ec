"""`jaxserve compile` reports what the TPU compiler says, and takes the pool in place."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "jaxserve", "compile"]
SMALL = ["--slots", "8", "--decode-rows", "8", "--chunk-rows", "64", "--max-model-len", "2048"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=False)


@pytest.mark.compilers
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is not installed")
def test_every_step_is_compiled_and_its_memory_told() -> None:
    result = run("smollm2-135m", "--target", "v6e-1", *SMALL, "--json")
    assert result.returncode == 0, result.stderr
    steps = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(step["shape"]["rows"], step["shape"]["decode"]) for step in steps] == [(8, True), (64, False)]
    for step in steps:
        assert step["aliased_bytes"] >= step["pool_bytes"]
        assert step["argument_bytes"] >= step["weight_bytes"] + step["pool_bytes"]
        # Of a model with so small a pool the temporaries are no share that says anything.
        assert step["temporary_bytes"] < step["weight_bytes"]


@pytest.mark.compilers
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is not installed")
def test_a_pipeline_copies_no_pool_and_hands_each_part_on_once() -> None:
    arguments = ["--target", "v6e-2", "--mesh", "pipe=2", "--slots", "8", "--decode-rows", "8"]
    result = run("smollm2-135m", *arguments, "--chunk-rows", "512", "--max-model-len", "2048", "--json")
    assert result.returncode == 0, result.stderr
    decode, chunk = (json.loads(line) for line in result.stdout.splitlines())
    # The embedding's sum, each row once to the next stage, and the sum of those that have logits: in a chunk
    # step few of all.
    for step, times in ((decode, 3), (chunk, 2)):
        assert step["aliased_bytes"] >= step["pool_bytes"]
        assert step["temporary_bytes"] < step["weight_bytes"]
        hidden = step["shape"]["rows"] * 576 * 2
        assert times * hidden <= step["sent_bytes"] < (times + 0.5) * hidden


@pytest.mark.compilers
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(find_spec("jax_cuda13_plugin") is None, reason="jax_cuda13_plugin is not installed")
def test_the_kernels_of_a_gpu_are_told() -> None:
    arguments = ["--target", "h200", *SMALL, "--quantize", "int8", "--kernels", "--json"]
    result = run("smollm2-135m", *arguments)
    assert result.returncode == 0, result.stderr
    for step in map(json.loads, result.stdout.splitlines()):
        names = {kernel["name"] for kernel in step["kernels"]}
        assert names == {"paged_attention", "quantised_matmul"}
        for kernel in step["kernels"]:
            assert kernel["spilled_bytes"] == 0 < kernel["registers"] <= 255, kernel
            assert 0 < kernel["shared_bytes"] <= 227 << 10, kernel


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["smollm2-135m", "--target", "v7-1"], "target 'v7-1' is not one of v5e, v5p, v6e, h200"),
        (["smollm2-135m", "--target", "v6e-8", "--tensor", "3"], "--tensor 3 on 8 devices"),
        (["smollm2-135m", "--target", "v6e-1", "--kernels"], "--kernels with target 'v6e-1'"),
        (["smollm2-135m", "--target", "v6e-8", "--mesh", "expert=2"], "--mesh expert=2 on 8 devices"),
    ],
)
def test_what_cannot_be_compiled_is_one_sentence(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
