"""How fast is the library on one machine? `python -m benchmarks.offline`

Decode and prefill rates of one model file, against transformers on torch where that is installed (the
`oracle` extra), the two taking turns, best of several; decode also as a share of the memory bandwidth that
this machine reaches in the same run. Then the time from process start to the first token, with a cold and a
warm compilation cache. Greedy, float32, fixed prompts.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from benchmarks.machine import describe, read_bandwidth
from jaxserve.commands.options import recipe_name
from jaxserve.engine.build import build_engine
from jaxserve.engine.options import EngineOptions
from jaxserve.loop import HostLoop
from jaxserve.plan import SamplingParams
from jaxserve.quantization import precision_of
from jaxserve.weights import open_checkpoint, resolve_model

STREAMS = (1, 4, 16)
PROMPT_LEN = 64
ANSWER_LEN = 64
PREFILL_LEN = 512


class Contender(Protocol):
    """Something that continues prompts of token ids."""

    def decode_rate(self, num_streams: int) -> float:
        """Tokens a second over all streams, from their first tokens on."""
        ...

    def prefill_rate(self) -> float:
        """Prompt tokens a second of one long prompt."""
        ...


def prompt(number: int, length: int) -> list[int]:
    """Token ids without meaning, the same in every run."""
    return [100 + (7 * number + 13 * position) % 1000 for position in range(length)]


class Ours:
    """The library's host loop on its engine."""

    def __init__(self, model: str, num_slots: int = max(STREAMS), **options: Any) -> None:
        """`options`: further fields of `EngineOptions`."""
        self.checkpoint = open_checkpoint(resolve_model(model))
        self.engine = build_engine(
            self.checkpoint, EngineOptions(num_slots=num_slots, max_model_len=1024, **options)
        )

    def decode_rate(self, num_streams: int, prompt_len: int = PROMPT_LEN) -> float:
        loop = HostLoop(self.engine)
        params = SamplingParams(temperature=0, max_tokens=ANSWER_LEN, ignore_eos=True)
        for number in range(num_streams):
            loop.add(str(number), prompt(number, prompt_len), params)
        waiting = {str(number) for number in range(num_streams)}
        num_tokens, started = 0, 0.0
        for delta in loop.run_until_idle():
            if not waiting:
                num_tokens += len(delta.token_ids)
            waiting.discard(delta.request_id)
            if not waiting and not started:
                started = time.perf_counter()
        return num_tokens / (time.perf_counter() - started)

    def prefill_rate(self) -> float:
        loop = HostLoop(self.engine)
        loop.add("prefill", prompt(0, PREFILL_LEN), SamplingParams(temperature=0, max_tokens=1))
        start = time.perf_counter()
        list(loop.run_until_idle())
        return PREFILL_LEN / (time.perf_counter() - start)


class Transformers:
    """Hugging Face transformers on torch: float32, KV cache, all cores."""

    def __init__(self, path: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.torch = torch
        where: dict[str, Any] = {"pretrained_model_name_or_path": str(path)}
        if path.suffix == ".gguf":
            where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
        self.model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()

    def decode_rate(self, num_streams: int) -> float:
        with self.torch.inference_mode():
            ids = self.torch.tensor([prompt(number, PROMPT_LEN) for number in range(num_streams)])
            out = self.model(ids, use_cache=True)
            token = out.logits[:, -1:].argmax(-1)
            start = time.perf_counter()
            for _ in range(ANSWER_LEN - 1):
                out = self.model(token, past_key_values=out.past_key_values, use_cache=True)
                token = out.logits[:, -1:].argmax(-1)
            return num_streams * (ANSWER_LEN - 1) / (time.perf_counter() - start)

    def prefill_rate(self) -> float:
        with self.torch.inference_mode():
            ids = self.torch.tensor([prompt(0, PREFILL_LEN)])
            start = time.perf_counter()
            self.model(ids, use_cache=True, logits_to_keep=1)
            return PREFILL_LEN / (time.perf_counter() - start)


@dataclass
class Report:
    """Everything that one run measured."""

    machine: str
    model: str
    precision: str
    deterministic: bool
    bandwidth: float
    """Bytes a second."""
    weight_bytes: int
    """Bytes of weights that one decode step reads."""
    rates: dict[str, dict[str, float]] = field(default_factory=dict)
    """Tokens a second by contender and by question."""
    first_token_seconds: dict[str, float] = field(default_factory=dict)
    compiles_after_ready: int = 0


def measure_rates(contenders: dict[str, Contender], repeats: int) -> dict[str, dict[str, float]]:
    """The best of several runs of each question, the contenders taking turns."""
    rates: dict[str, dict[str, float]] = {name: {} for name in contenders}
    for _ in range(repeats):
        for name, contender in contenders.items():
            measured = {f"decode {n}": contender.decode_rate(n) for n in STREAMS}
            measured["prefill"] = contender.prefill_rate()
            for question, rate in measured.items():
                rates[name][question] = max(rate, rates[name].get(question, 0.0))
    return rates


def first_token_seconds(model: str, cache: Path) -> float:
    """From process start to the first byte of the answer on the command line."""
    command = [
        sys.executable,
        "-m",
        "jaxserve",
        "generate",
        model,
        "--prompt",
        "What is the capital of France?",
    ]
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(cache)}
    start = time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    ) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        seconds = time.perf_counter() - start
        process.stdout.read()
    if not first or process.returncode:
        raise RuntimeError(f"{' '.join(command)} gave no answer (exit status {process.returncode})")
    return seconds


def measure_start(model: str, repeats: int) -> dict[str, float]:
    """Cold once, then warm, best of several."""
    with tempfile.TemporaryDirectory() as folder:
        cold = first_token_seconds(model, Path(folder))
        warm = min(first_token_seconds(model, Path(folder)) for _ in range(repeats))
    return {"cold": cold, "warm": warm}


def print_report(report: Report) -> None:
    ours = report.rates["jaxserve"]
    theirs = report.rates.get("transformers")
    print(f"machine    {report.machine}")
    print(f"model      {report.model}, {report.precision}, greedy, deterministic={report.deterministic}")
    print(f"bandwidth  {report.bandwidth / 1e9:.1f} GB/s read by a product of one row, this run")
    print(f"{'tokens/s':<14}{'jaxserve':>10}" + (f"{'transformers':>14}{'ratio':>8}" if theirs else ""))
    for question, rate in ours.items():
        line = f"{question:<14}{rate:>10.1f}"
        if theirs:
            line += f"{theirs[question]:>14.1f}{rate / theirs[question]:>8.2f}"
        print(line)
    limit = report.bandwidth / report.weight_bytes
    print(f"decode 1 is {ours['decode 1'] / limit:.0%} of what the bandwidth allows ({limit:.1f} tokens/s)")
    print(f"decode 16 is {ours['decode 16'] / ours['decode 1']:.2f} times decode 1")
    for state, seconds in report.first_token_seconds.items():
        print(f"process start to first token, {state} compilation cache: {seconds:.2f} s")
    print(f"compiles after ready: {report.compiles_after_ready}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each measurement; the best counts")
    parser.add_argument(
        "--deterministic",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="measure the shape-invariant mode",
    )
    parser.add_argument(
        "--quantize", type=recipe_name, metavar="RECIPE", help="number formats of the weights"
    )
    parser.add_argument("--no-peer", action="store_true", help="leave transformers out")
    parser.add_argument("--no-start", action="store_true", help="leave the start-up times out")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    ours = Ours(args.model, deterministic=args.deterministic, quantize=args.quantize)
    contenders: dict[str, Contender] = {"jaxserve": ours}
    has_peer = all(importlib.util.find_spec(name) for name in ("torch", "transformers"))
    if has_peer and not args.no_peer:
        contenders["transformers"] = Transformers(ours.checkpoint.path)
    report = Report(
        machine=describe(),
        model=args.model,
        precision=precision_of(ours.engine.config),
        deterministic=args.deterministic,
        bandwidth=read_bandwidth(),
        weight_bytes=ours.engine.weight_bytes,
    )
    before = ours.engine.compiles_after_ready
    report.rates = measure_rates(contenders, args.repeats)
    report.compiles_after_ready = ours.engine.compiles_after_ready - before
    if not args.no_start:
        report.first_token_seconds = measure_start(args.model, args.repeats)
    print_report(report)
    if args.json:
        args.json.write_text(json.dumps(asdict(report), indent=1) + "\n")


if __name__ == "__main__":
    main()
