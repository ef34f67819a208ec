"""How fast is the int8 path on a CPU beside llama.cpp? `python -m benchmarks.cpu_peer --llama-bin DIR`

Decode and prefill rates of one GGUF file, here quantised anew by a recipe, there as the file has it, through
llama.cpp's own `llama-batched-bench` on as many threads as there are processors. The two take turns; the best
of several counts. DIR holds that program, built for this machine (`cmake -DCMAKE_BUILD_TYPE=Release
-DGGML_NATIVE=ON`, target `llama-batched-bench`). Greedy, prompts of 128 tokens, answers of 64.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import jax

from benchmarks.machine import describe
from benchmarks.offline import ANSWER_LEN, PREFILL_LEN, Ours
from jaxserve.commands.options import recipe_name
from jaxserve.quantization import precision_of

STREAMS = (1, 4, 16, 32)
PROMPT_LEN = 128
TARGETS = {"decode 1": 0.45, "decode 16": 1.5, "decode 32": 2.0, "prefill": 2.0}
"""What the ratio should be at least."""
BATCHED_BENCH = "llama-batched-bench"


class LlamaCpp:
    """llama.cpp's benchmark of batched decoding."""

    def __init__(self, folder: Path, model: Path, num_threads: int) -> None:
        self._program = folder / BATCHED_BENCH
        if not self._program.is_file():
            raise ValueError(f"{self._program} is missing; see --help for how to build it")
        self._model = model
        self._num_threads = num_threads

    def decode_rate(self, num_streams: int) -> float:
        return self._run(PROMPT_LEN, ANSWER_LEN, num_streams)["speed_tg"]

    def prefill_rate(self) -> float:
        return self._run(PREFILL_LEN, 1, 1)["speed_pp"]

    def _run(self, prompt_len: int, answer_len: int, num_streams: int) -> dict[str, float]:
        settings = {
            "-m": self._model,
            "-npp": prompt_len,
            "-ntg": answer_len,
            "-npl": num_streams,
            "-c": num_streams * (prompt_len + answer_len + 8),
            "-t": self._num_threads,
            "--output-format": "jsonl",
        }
        command = [str(self._program), *(str(part) for pair in settings.items() for part in pair)]
        process = subprocess.run(command, capture_output=True, text=True, check=True)
        lines = [line for line in process.stdout.splitlines() if line.startswith("{")]
        return json.loads(lines[-1])


@dataclass
class Report:
    """Everything that one run measured."""

    machine: str
    jax: str
    model: str
    precision: str
    rates: dict[str, dict[str, float]] = field(default_factory=dict)
    """Tokens a second by contender and by question."""


def measure(
    ours: Ours, peer: LlamaCpp, repeats: int, streams: Sequence[int], prefill: bool
) -> dict[str, dict[str, float]]:
    """The best of several runs of each question, the two taking turns at each."""
    rates: dict[str, dict[str, float]] = {"jaxserve": {}, "llama.cpp": {}}

    def note(question: str, our_rate: float, their_rate: float) -> None:
        for contender, rate in (("jaxserve", our_rate), ("llama.cpp", their_rate)):
            rates[contender][question] = max(rate, rates[contender].get(question, 0.0))

    for _ in range(repeats):
        for count in streams:
            note(f"decode {count}", ours.decode_rate(count, PROMPT_LEN), peer.decode_rate(count))
        if prefill:
            note("prefill", ours.prefill_rate(), peer.prefill_rate())
    return rates


def save(report: Report, path: Path) -> None:
    """Write a report; questions that it does not answer are left as the file has them, if all else agrees."""
    fields = asdict(report)
    if path.exists():
        earlier = json.loads(path.read_text())
        # The load is of the moment, the rest of the machine's description is not.
        if all(_settled(earlier[name]) == _settled(fields[name]) for name in fields if name != "rates"):
            fields["rates"] = {who: earlier["rates"][who] | rates for who, rates in report.rates.items()}
    path.write_text(json.dumps(fields, indent=1) + "\n")


def _settled(text: str) -> str:
    return re.sub(r"load [\d.]+", "", text)


def print_report(report: Report) -> None:
    print(f"machine    {report.machine}")
    print(f"model      {report.model}, {report.precision}, jax {report.jax}")
    print(f"{'tokens/s':<12}{'jaxserve':>10}{'llama.cpp':>11}{'ratio':>8}{'target':>8}")
    for question, rate in report.rates["jaxserve"].items():
        theirs = report.rates["llama.cpp"][question]
        target = f"{TARGETS[question]:>8.2f}" if question in TARGETS else ""
        print(f"{question:<12}{rate:>10.1f}{theirs:>11.1f}{rate / theirs:>8.2f}{target}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--llama-bin", type=Path, required=True, metavar="DIR")
    parser.add_argument("--model", default="smollm2-135m", help="a catalogue name or a .gguf file")
    parser.add_argument("--quantize", type=recipe_name, metavar="RECIPE", default="int8")
    parser.add_argument("--kv-format", default="auto")
    parser.add_argument(
        "--streams", type=int, nargs="*", default=STREAMS, help="of the questions of decoding"
    )
    parser.add_argument("--prefill", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of llama.cpp")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each measurement; the best counts")
    parser.add_argument("--json", type=Path, help="also write the figures to this file, or add them")
    args = parser.parse_args()
    ours = Ours(args.model, max(STREAMS), quantize=args.quantize, kv_format=args.kv_format)
    peer = LlamaCpp(args.llama_bin, ours.checkpoint.path, args.threads)
    precision = precision_of(ours.engine.config)
    rates = measure(ours, peer, args.repeats, args.streams, args.prefill)
    report = Report(describe(), jax.__version__, args.model, precision, rates)
    print_report(report)
    if args.json:
        save(report, args.json)


if __name__ == "__main__":
    main()
