"""What `generate` and `chat` answer: over a fake model in this process, and once for real in another."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.cli import main
from jaxserve.plan import StepHandle, StepResult
from tests.cli.conftest import opening, run_cli
from tests.conftest import REPOSITORY
from tests.fake_engine import FakeEngine
from tests.fake_model import FakeModel

GREEDY = ["--temperature", "0", "--top-p", "1"]
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]


def typing(monkeypatch: pytest.MonkeyPatch, *lines: str | type[BaseException]) -> None:
    """What the user types at a terminal; an exception stands for its key."""
    script = iter(lines)

    def read_line(prompt: str = "") -> str:
        line = next(script, EOFError)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", read_line)


def expected_text(model: FakeModel, prompt: str | list[dict[str, str]], params: SamplingParams) -> str:
    with LLM(model.opened(), progress=False) as llm:
        ask = llm.generate if isinstance(prompt, str) else llm.chat
        return ask(prompt, params)[0].outputs[0].text  # type: ignore[arg-type,operator]


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens)


# generate --------------------------------------------------------------------------------------------------


def test_generate_answers_through_the_template(model: FakeModel, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "m", "--prompt", FRANCE[0]["content"], "--max-tokens", "20"]) == 0
    captured = capsys.readouterr()
    assert captured.out == expected_text(model, FRANCE, greedy(20)) + "\n"
    assert captured.err == ""  # No terminal, so no status.


def test_generate_raw_and_without_a_template(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = opening(monkeypatch, FakeModel(template=None))
    expected = expected_text(model, "Once", greedy(20)) + "\n"
    assert main(["generate", "m", "-p", "Once", "--max-tokens", "20"]) == 0
    assert capsys.readouterr().out == expected
    opening(monkeypatch, FakeModel())
    assert main(["generate", "m", "-p", "Once", "--max-tokens", "20", "--raw"]) == 0
    assert capsys.readouterr().out == expected


def test_a_system_message_comes_first(model: FakeModel, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "m", "-p", "hi", "--system", "be brief", "--max-tokens", "9"]) == 0
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert capsys.readouterr().out == expected_text(model, messages, greedy(9)) + "\n"


def test_the_prompt_from_a_file_or_standard_input(
    model: FakeModel, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    expected = expected_text(model, "two\nlines\n", greedy(9)) + "\n"
    (tmp_path / "prompt.txt").write_text("two\nlines\n\n")
    for source in (["--prompt-file", str(tmp_path / "prompt.txt")], ["--prompt-file", "-"], []):
        monkeypatch.setattr(sys, "stdin", io.StringIO("two\nlines\n\n"))
        assert main(["generate", "m", "--raw", "--max-tokens", "9", *source]) == 0
        assert capsys.readouterr().out == expected


def test_text_comes_as_it_is_sampled(model: FakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []

    class Watched(io.StringIO):
        def flush(self) -> None:
            seen.append((len(model.device.plans), len(self.getvalue())))

    monkeypatch.setattr(sys, "stdout", Watched())
    assert main(["generate", "m", "-p", "hi", "--raw", "--max-tokens", "20", "--ignore-eos"]) == 0
    assert len({num_steps for num_steps, _ in seen}) >= 15
    assert len({num_characters for _, num_characters in seen}) > 5


def test_json_is_one_object_with_everything(model: FakeModel, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--json", "--max-tokens", "5", "--ignore-eos", "--temperature", "1", "--seed", "7"]
    assert main(["generate", "m", "-p", "hi", *arguments, "--logprobs", "2"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["model"], report["prompt"], report["seed"]) == ("m", "hi", 7)
    assert len(report["token_ids"]) == len(report["logprobs"]) == 5
    assert (report["finish_reason"], report["stop_reason"]) == ("length", None)
    assert report["text"] == model.tokenizer.decode(report["token_ids"])
    num_prompt = len(report["prompt_token_ids"])
    usage = {"prompt_tokens": num_prompt, "completion_tokens": 5, "total_tokens": num_prompt + 5}
    assert report["usage"] == usage
    assert report["timings"].keys() == {
        "load_seconds",
        "first_token_seconds",
        "total_seconds",
        "tokens_per_second",
    }
    assert all(seconds >= 0 for seconds in report["timings"].values())
    assert {entry["token_id"] for entry in report["logprobs"][0]} >= {report["token_ids"][0]}
    assert "outputs" not in report


def test_several_samples(model: FakeModel, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "m", "-p", "hi", "-n", "3", "--max-tokens", "5", "--temperature", "1"]
    arguments += ["--seed", "7", "--ignore-eos"]
    assert main([*arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert len(report["outputs"]) == 3
    assert report["text"] == report["outputs"][0]["text"]
    assert report["usage"]["completion_tokens"] == 15
    assert model.options.num_slots == 3
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if line.startswith("--- ")] == [
        f"--- sample {number} of 3" for number in (1, 2, 3)
    ]
    assert all(sample["text"].removesuffix("\n") in out for sample in report["outputs"])


def test_options_reach_the_engine_and_the_sampler(
    model: FakeModel, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = ["--max-model-len", "100", "--kv-memory", "1M", "--dtype", "bfloat16", "--kv", "int8"]
    engine += ["--quantize", "int8"]
    engine += ["--deterministic", "--max-chunk", "32", "--host-kv-memory", "1M", "--speculative", "ngram"]
    sampling = ["--top-p", "0.9", "--top-k", "5", "--min-p", "0.1", "--stop", "x", "--stop", "y"]
    sampling += ["--repetition-penalty", "1.1", "--presence-penalty", "0.5", "--frequency-penalty", "0.25"]
    sampling += ["--min-tokens", "2", "--max-tokens", "3", "--temperature", "0.5", "--seed", "4"]
    assert main(["generate", "m", "-p", "hi", *engine, *sampling]) == 0
    options = model.options
    assert (options.max_model_len, options.kv_memory, options.dtype) == (100, 2**20, "bfloat16")
    assert (options.quantize, options.kv_format) == ("int8", "int8")
    assert (options.deterministic, options.max_chunk) == (True, 32)
    assert (options.num_slots, options.host_kv_memory, options.speculative) == (1, 2**20, "ngram")
    (load,) = model.device.loads
    assert load.params == SamplingParams(
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        stop=["x", "y"],
        repetition_penalty=1.1,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        min_tokens=2,
        max_tokens=3,
        temperature=0.5,
        seed=4,
    )


def test_verbose_brings_timings_on_standard_error(
    model: FakeModel, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "m", "-p", "hi", "-v", "--max-tokens", "4", "--ignore-eos"]) == 0
    captured = capsys.readouterr()
    assert "4 tokens in " in captured.err
    assert "tokens in" not in captured.out


class InterruptedEngine(FakeEngine):
    """Ctrl-C is pressed while the fourth step of each answer runs."""

    def collect(self, handle: StepHandle) -> StepResult:
        if len(self.plans) == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return super().collect(handle)


def test_an_interrupt_ends_generate_with_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opening(monkeypatch, FakeModel(InterruptedEngine))
    assert main(["generate", "m", "-p", "hi", "--ignore-eos"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_a_reader_that_leaves_ends_it_quietly() -> None:
    code = (
        "import sys, jaxserve.opened_model\n"
        "from tests.fake_model import FakeModel\n"
        "jaxserve.opened_model.open_model = lambda name, progress: FakeModel()\n"
        "from jaxserve.cli import main\n"
        "sys.exit(main(['generate', 'm', '-p', 'hi', '--ignore-eos', '--max-tokens', '90000',"
        " '--max-model-len', '1000']))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    with process.stderr:
        assert process.stderr.read() == b""
    assert process.wait(60) == 141


# chat ------------------------------------------------------------------------------------------------------


def test_chat_keeps_the_conversation(
    model: FakeModel, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    typing(monkeypatch, "hi", "", "more", "/reset", "hi", "/exit", "never read")
    assert main(["chat", "m", "--system", "s", "--max-tokens", "5", *GREEDY]) == 0
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]
    first = expected_text(model, messages, greedy(5))
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "more"}]
    second = expected_text(model, messages, greedy(5))
    captured = capsys.readouterr()
    assert captured.out == f"{first}\n{second}\n{first}\n"
    assert "(a new conversation)" in captured.err


def test_chat_says_when_the_conversation_no_longer_fits(
    model: FakeModel, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    typing(monkeypatch, "x" * 80, "y" * 80, "z")
    assert main(["chat", "m", "--max-tokens", "5", "--ignore-eos", *GREEDY]) == 0
    captured = capsys.readouterr()
    assert "the limit is 127" in captured.err
    assert "/reset starts a new conversation" in captured.err
    assert "(cut off at 5 tokens: --max-tokens)" in captured.err
    first = [{"role": "user", "content": "x" * 80}]
    assert len(model.device.loads) == 2  # What did not fit is forgotten, and the next message is asked.
    assert captured.out.startswith(
        expected_text(model, first, SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    )


def test_chat_says_when_an_answer_has_filled_the_model(
    model: FakeModel, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    typing(monkeypatch, "x" * 90)
    assert main(["chat", "m", "--ignore-eos"]) == 0
    assert "has reached the limit of 128 tokens" in capsys.readouterr().err


def test_ctrl_c_stops_the_answer_and_not_the_program(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = opening(monkeypatch, FakeModel(InterruptedEngine))
    typing(monkeypatch, KeyboardInterrupt, "hi", "more", EOFError)
    assert main(["chat", "m", "--max-tokens", "9", "--ignore-eos"]) == 0
    captured = capsys.readouterr()
    assert captured.err.count("(stopped)") == 1
    first, second = model.device.loads
    said = model.tokenizer.decode(second.tokens).partition("[assistant]")[2].partition("[user]")[0]
    assert captured.out.removeprefix("\n").startswith(f"{said}\n")
    assert model.tokenizer.decode(first.tokens) == "[user]hi[assistant]"
    assert model.tokenizer.decode(second.tokens).endswith("[user]more[assistant]")


def test_chat_needs_a_template_and_knows_its_commands(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opening(monkeypatch, FakeModel(template=None))
    assert main(["chat", "m"]) == 2
    assert "m has no chat template" in capsys.readouterr().err
    opening(monkeypatch, FakeModel())
    typing(monkeypatch, "/quit now")
    assert main(["chat", "m"]) == 0
    assert "/quit is no command" in capsys.readouterr().err


# For real --------------------------------------------------------------------------------------------------


def test_a_real_answer_in_another_process(shared_data: Path) -> None:
    folder = shared_data / "models" / "stories260K" / "hf"
    cases = json.loads((shared_data / "golden" / "stories260K.json").read_text())["cases"]
    case = next(case for case in cases if case["prompt_ids"] == [1])
    engine = ["--max-model-len", "128", "--max-chunk", "16"]
    result = run_cli(
        "generate", str(folder), "--raw", "--json", "--max-tokens", "40", *engine, stdin=subprocess.DEVNULL
    )
    assert (result.returncode, result.stderr) == (0, "")
    report = json.loads(result.stdout)
    assert report["token_ids"] == case["output_ids"][:40]
    assert min(case["top2_margin"][:40]) > 1e-3
    assert case["text"].startswith(report["text"])
