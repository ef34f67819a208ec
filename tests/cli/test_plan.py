"""`jaxserve plan`: as text, as JSON and as a picture; and what is refused."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from jaxserve.cli import main
from jaxserve.planning import Trace, TraceRequest, write_trace

SHORT = ["--prompt-mean", "100", "--output-mean", "16", "--slots", "8"]
LLAMA = ["plan", "llama-3.1-8b", "--target", "h100", *SHORT]


def plan(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    assert main([*LLAMA, *arguments]) == status
    return capsys.readouterr().out


def test_text_says_what_to_take(capsys: pytest.CaptureFixture[str]) -> None:
    text = plan(capsys, "--mesh", "1", "--rate", "50", "--ttft", "1", "--tpot", "0.05", "--price", "2.5")
    assert "llama-3.1-8b: 8.030 G parameters, 32 layers, up to 131072 tokens" in text
    assert "131,072 bytes a token (full attention: 2 x 32 layers x 8 heads x (128 x 2) in bfloat16)" in text
    assert "TTFT 1 s, TPOT 50 ms for 95% of the requests" in text
    assert "NVIDIA H100 SXM data sheet" in text
    table = [line.split() for line in text.splitlines() if line.startswith(("precision", "bfloat16", "int8"))]
    assert [line[0] for line in table] == ["precision", "bfloat16", "int8"]
    assert table[1][3:5] == ["14.96", "GiB"]
    assert text.splitlines()[-1].startswith("take       int8 on 1 chip: ")
    assert text.splitlines()[-1].split("bound by ")[1] in ("bandwidth", "FLOPs")


def test_json_has_every_candidate(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(
        plan(capsys, "--json", "--mesh", "1,8", "--precision", "bfloat16,w8a8", "--acceptance", "0.6")
    )
    names = [(row["precision"], row["mesh"], row["acceptance"]) for row in found["rows"]]
    assert names == [
        (precision, mesh, acceptance)
        for precision in ("bfloat16", "w8a8")
        for mesh in (1, 8)
        for acceptance in (None, 0.6)
    ]
    assert found["model"]["parameters"] == 8030261248
    assert found["kv"]["groups"][0]["token_bytes"] == 131072
    assert found["limits"] == {"ttft": None, "tpot": None, "attainment": 0.95}
    assert found["workload"]["prompt_mean"] == pytest.approx(100, rel=0.05)
    best = found["rows"][found["best"]]
    assert best["output_rate"] / best["chips"] == max(
        row["output_rate"] / row["chips"] for row in found["rows"]
    )


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_the_picture_is_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from matplotlib.image import imread

    target = tmp_path / "plan.png"
    plan(capsys, "--mesh", "1", "--concurrency", "4", "--ttft", "1", "--png", str(target))
    height, width, _ = imread(target).shape
    assert (height > 200, width > 1000) == (True, True)


def test_a_trace_is_replayed_at_its_own_rate(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    requests = [TraceRequest(arrival=0.5 * n, prompt_tokens=50 + n, output_tokens=8) for n in range(21)]
    write_trace(Trace("own", tuple(requests)), tmp_path / "own.jsonl")
    found = json.loads(plan(capsys, "--json", "--mesh", "1", "--trace", str(tmp_path / "own.jsonl")))
    assert found["workload"]["rate"] == pytest.approx(2.1)
    assert found["workload"]["prompt_mean"] == 60
    assert found["engine"]["max_model_len"] == 78


def test_a_config_alone_is_enough(capsys: pytest.CaptureFixture[str], shared_data: Path) -> None:
    folder = shared_data / "models" / "stories260K" / "hf"
    sizes = []
    for model in (folder, folder / "config.json"):
        arguments = ["plan", str(model), "--target", "v6e-4", "--json", *SHORT]
        assert main(arguments) == 0
        found = json.loads(capsys.readouterr().out)
        sizes.append(found["model"]["parameters"])
        assert {row["mesh"] for row in found["rows"]} == {1, 2, 4}
    assert sizes[0] == sizes[1]


def test_any_axes_are_planned_for(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--precision", "int8", "--mesh", "2,data=2,tensor=2+pipe=2"]
    table = [line.split()[:2] for line in plan(capsys, *arguments).splitlines() if line.startswith("int8 ")]
    assert table == [["int8", "2"], ["int8", "data=2"], ["int8", "tensor=2,pipe=2"]]


def test_by_default_the_best_of_each_number_of_chips(capsys: pytest.CaptureFixture[str]) -> None:
    def meshes(model: str, target: str, *arguments: str) -> list[str]:
        main(["plan", model, "--target", target, "--json", "--precision", "bfloat16", *SHORT, *arguments])
        return [row["axes"] for row in json.loads(capsys.readouterr().out)["rows"]]

    # Three KV heads are for no even number of chips: replicas are, where they may be.
    found = meshes("smollm2-135m", "v5e-4")
    assert (found[0], found[-1]) == ("tensor=1", "data=4")
    assert not any("tensor" in axes for axes in found[1:])
    # Ever more chips until some hold the weights.
    assert meshes("llama-3.1-70b", "v5e") == [f"tensor={size}" for size in (1, 2, 4, 8, 16)]


def test_what_no_candidate_serves_has_its_own_status(capsys: pytest.CaptureFixture[str]) -> None:
    text = plan(capsys, "--mesh", "1", "--tpot", "0.0001", status=1)
    assert "none of these serves the workload within the limits" in text
    assert "TPOT" in text.split("bound by")[1]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["gpt-9", "--target", "v5e"], "model 'gpt-9' is neither one of"),
        (["llama-3.1-8b", "--target", "v9"], "target 'v9' is not one of cpu, v5e, v5p, v6e, h100, h200"),
        (["llama-3.1-8b", "--target", "v5e-999"], "a plan is for 1 to 256 chips"),
        (
            ["llama-3.1-8b", "--target", "v5e", "--mesh", "3"],
            "mesh tensor=3: kv_heads has size 8, each with 4 queries, which 3 devices neither",
        ),
        (
            ["llama-3.1-8b", "--target", "v5e-4", "--mesh", "8"],
            "a mesh of 8 chips is out of range: there are 1",
        ),
        (
            ["llama-3.1-8b", "--target", "v5e", "--mesh", "rows=2"],
            "mesh 'rows=2': expected auto, or tensor=N",
        ),
        (["llama-3.1-8b", "--target", "v5e", "--mesh", "expert=2"], "the model has no experts for mesh axis"),
        (
            ["llama-3.1-8b", "--target", "v5e", "--mesh", "data=3"],
            "are not divided by the 3 replicas of data=3",
        ),
        (["llama-3.1-8b", "--target", "v5e", "--precision", "fp5"], "precision 'fp5' is not one of float32"),
        (["llama-3.1-8b", "--target", "v5e", "--acceptance", "1"], "--acceptance 1 is out of range"),
        (["llama-3.1-8b", "--target", "v5e", "--reuse", "1.5"], "a reuse of 1.5 is out of range"),
        (["llama-3.1-8b", "--target", "v5e", "--prompt-p95", "9"], "a 95th percentile of 9 tokens"),
        (["llama-3.1-8b", "--target", "v5e", "--rate", "-1"], "a rate of -1 requests a second"),
        (["llama-3.1-8b", "--target", "v5e", "--concurrency", "0"], "--concurrency 0 is below 1"),
        (["llama-3.1-8b", "--target", "v5e", "--rate", "1", "--concurrency", "2"], "give one of them"),
        (["smollm2-135m", "--target", "v5e", "--prompt-mean", "9000"], "than the 8192 tokens"),
        (["llama-3.1-70b", "--target", "v5e-1"], "1 x v5e has 1.44e+10 bytes a chip to use"),
    ],
)
def test_bad_input_is_one_sentence(
    capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str
) -> None:
    assert main(["plan", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("jaxserve plan: error: ")
    assert captured.err.count("\n") == 1
    assert complaint in captured.err
