"""What does drafting bring? `python -m benchmarks.speculation PROMPTS`

Greedy answers to real prompts, with and without drafts on one and the same engine, the two taking turns:
tokens a second of both and their ratio for each task, tokens that a verification brings, and whether all
answers are the same, which they have to be with --deterministic.

PROMPTS is a folder with `spec_bench/question.jsonl`, `humaneval/HumanEval.jsonl.gz` and `gsm8k/test.jsonl`,
as their authors publish them; those that are missing are left out.
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import describe
from jaxserve.engine.build import EngineOptions
from jaxserve.engine.engine import DeviceEngine
from jaxserve.loop import HostLoop
from jaxserve.opened_model import open_model
from jaxserve.plan import SamplingParams
from jaxserve.quantization import RECIPES, precision_of
from jaxserve.scheduling.draft_tally import SpeculationStatistics
from jaxserve.speculation import named_speculation
from jaxserve.text import Tokenizer

_SOURCES = {
    "spec_bench/question.jsonl": ("category", "turns"),
    "humaneval/HumanEval.jsonl.gz": ("code", "prompt"),
    "gsm8k/test.jsonl": ("gsm8k", "question"),
}
"""For each file its task, or the field that names it, and the field of the prompt."""
_TASKS = ("summarization", "rag", "qa", "translation", "math_reasoning", "code", "gsm8k")


@dataclass(frozen=True)
class Run:
    """Answers to one task's prompts."""

    answers: list[list[int]]
    seconds: float
    num_steps: int
    drafted: SpeculationStatistics

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return sum(map(len, self.answers)) / self.seconds


def read_prompts(folder: Path, num_prompts: int) -> dict[str, list[str]]:
    """The first few prompts of each task."""
    prompts: dict[str, list[str]] = defaultdict(list)
    for name, (task, field) in _SOURCES.items():
        for record in _records(folder / name):
            asked = prompts[record.get(task, task)]
            text = record[field]
            if len(asked) < num_prompts:
                asked.append(text if isinstance(text, str) else text[0])
    return {task: prompts[task] for task in _TASKS if prompts[task]}


def _records(path: Path) -> Iterator[dict[str, Any]]:
    if path.is_file():
        data = path.read_bytes()
        text = gzip.decompress(data) if path.suffix == ".gz" else data
        yield from map(json.loads, text.splitlines())


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """As the model's chat template has it."""
    chat = tokenizer.render_chat([{"role": "user", "content": text}], True, None)
    return tokenizer.encode(chat, add_special_tokens=False)


def answer(
    engine: DeviceEngine, prompts: list[list[int]], streams: int, max_tokens: int, max_drafts: int
) -> Run:
    """Answer the prompts, so many at a time, without prefix cache; `max_drafts` 0 drafts nothing."""
    speculation = named_speculation("ngram", max_drafts) if max_drafts else None
    loop = HostLoop(engine, speculation=speculation)
    waiting = list(enumerate(prompts))
    answers: dict[str, list[int]] = {}
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    started = time.perf_counter()
    while waiting or not loop.idle:
        while waiting and loop.num_open < streams:
            number, prompt = waiting.pop(0)
            loop.add(str(number), prompt, params)
        for delta in loop.step():
            if delta.output is not None:
                answers[delta.request_id] = list(delta.output.outputs[0].token_ids)
    seconds = time.perf_counter() - started
    snapshot = loop.snapshot()
    return Run(
        [answers[str(number)] for number in range(len(prompts))],
        seconds,
        snapshot.num_steps,
        snapshot.speculation or SpeculationStatistics(),
    )


def report(task: str, streams: int, runs: list[tuple[Run, Run]]) -> None:
    """A line of the table: the best of several runs."""
    plain = max((plain for plain, _ in runs), key=lambda run: run.rate)
    drafting = max((drafting for _, drafting in runs), key=lambda run: run.rate)
    num_same = sum(ours == theirs for ours, theirs in zip(plain.answers, drafting.answers, strict=True))
    drafted = drafting.drafted
    length = 1.0 + drafted.num_accepted / max(drafted.num_verifications, 1)
    print(
        f"{task:<15}{streams:>7}{plain.rate:>10.1f}{drafting.rate:>10.1f}{drafting.rate / plain.rate:>7.2f}"
        f"{plain.num_steps / drafting.num_steps:>7.2f}{length:>9.2f}"
        f"{drafted.num_accepted / max(drafted.num_drafted, 1):>10.0%}{num_same:>8}/{len(plain.answers)}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--num-prompts", type=int, default=4, help="of each task (default %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=128, help="of an answer (default %(default)s)")
    parser.add_argument("--max-drafts", type=int, default=7, help="in a step (default %(default)s)")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4], help="answers side by side")
    parser.add_argument("--tasks", nargs="+", choices=_TASKS, default=_TASKS)
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--quantize", choices=RECIPES, help="number formats of the weights")
    parser.add_argument("--deterministic", action="store_true", help="in the shape-invariant mode")
    parser.add_argument("--repeats", type=int, default=2, help="the best counts (default %(default)s)")
    args = parser.parse_args()
    model = open_model(args.model)
    options = EngineOptions(
        num_slots=max(args.streams),
        max_model_len=2048,
        dtype=args.dtype,
        quantize=args.quantize,
        deterministic=args.deterministic,
        speculative="ngram",
        max_drafts=args.max_drafts,
    )
    engine = model.build_engine(options)
    print(f"{describe()}\n{args.model}, {precision_of(engine.config)}, deterministic={args.deterministic}")
    print("task           streams   plain/s drafted/s  ratio  steps accepted of drafts    same", flush=True)
    for task, texts in read_prompts(args.prompts, args.num_prompts).items():
        if task in args.tasks:
            prompts = [encode(model.tokenizer, text) for text in texts]
            for streams in args.streams:
                runs = [
                    (
                        answer(engine, prompts, streams, args.max_tokens, 0),
                        answer(engine, prompts, streams, args.max_tokens, args.max_drafts),
                    )
                    for _ in range(args.repeats)
                ]
                report(task, streams, runs)


if __name__ == "__main__":
    main()
