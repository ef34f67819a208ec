"""What does drafting bring? `python -m benchmarks.speculation PROMPTS`

Greedy answers to real prompts, with and without drafts on one and the same engine, the two taking turns. For
each task and number of streams: tokens a second, prompts included, and of an answer from its first token on
(which is what drafts can change); the ratios; steps spared; tokens that a verification brings; the time saved
as the loop itself estimates it; and whether all answers are the same, as they must be with --deterministic.
The best of several repetitions counts, of either side. `--save FILE` writes the same as JSON.

PROMPTS is a folder with `spec_bench/question.jsonl`, `mt_bench/question.jsonl`,
`humaneval/HumanEval.jsonl.gz` and `gsm8k/test.jsonl`, as their authors publish them; those that are missing
are left out.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shlex
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.machine import describe
from jaxserve.commands.options import parse_speculative, recipe_name
from jaxserve.engine.engine import DeviceEngine
from jaxserve.engine.options import EngineOptions
from jaxserve.loop import HostLoop
from jaxserve.opened_model import open_model
from jaxserve.outputs import RequestOutput
from jaxserve.plan import SamplingParams
from jaxserve.quantization import precision_of
from jaxserve.scheduling.draft_tally import SpeculationStatistics
from jaxserve.speculation import Speculation, named_speculation
from jaxserve.text import Tokenizer

_SOURCES = {
    "mt_bench/question.jsonl": ("chat", "turns", False),
    "spec_bench/question.jsonl": ("category", "turns", True),
    "humaneval/HumanEval.jsonl.gz": ("code", "prompt", False),
    "gsm8k/test.jsonl": ("gsm8k", "question", False),
}
"""For each file its task, the field of the prompt, and whether the former is the field with the task."""
_TASKS = ("summarization", "rag", "code", "gsm8k", "chat", "qa", "translation", "math_reasoning")


@dataclass(frozen=True)
class Run:
    """Answers to one task's prompts."""

    outputs: list[RequestOutput]
    seconds: float
    num_steps: int
    drafted: SpeculationStatistics

    @property
    def answers(self) -> list[list[int]]:
        return [output.outputs[0].token_ids for output in self.outputs]

    @property
    def rate(self) -> float:
        """Tokens a second, prompts included."""
        return sum(map(len, self.answers)) / self.seconds

    @property
    def answer_rate(self) -> float:
        """Tokens a second of an answer, from its first on."""
        times = [output.metrics for output in self.outputs]
        seconds = sum(one.finish_time - (one.first_token_time or one.finish_time) for one in times)
        return sum(len(answer) - 1 for answer in self.answers) / seconds


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    task: str
    streams: int
    plain_tokens_per_second: float
    drafted_tokens_per_second: float
    ratio: float
    plain_answer_tokens_per_second: float
    drafted_answer_tokens_per_second: float
    answer_ratio: float
    steps_ratio: float
    accepted_length: float
    accepted_share: float
    """Of the drafted tokens."""
    seconds_saved: float
    """As the loop estimates it."""
    num_same: int
    num_answers: int

    def __str__(self) -> str:
        return (
            f"{self.task:<15}{self.streams:>7}{self.plain_tokens_per_second:>9.1f}"
            f"{self.drafted_tokens_per_second:>9.1f}{self.ratio:>7.2f}{self.answer_ratio:>9.2f}"
            f"{self.steps_ratio:>7.2f}{self.accepted_length:>9.2f}{self.accepted_share:>10.0%}"
            f"{self.seconds_saved:>8.2f}{self.num_same:>6}/{self.num_answers}"
        )


_HEAD = "task           streams  plain/s  drafts/s  ratio  answers  steps accepted of drafts saved s  same"


def read_prompts(folder: Path, num_prompts: int) -> dict[str, list[str]]:
    """The first few prompts of each task."""
    prompts: dict[str, list[str]] = defaultdict(list)
    for name, (task, field, in_field) in _SOURCES.items():
        for record in _records(folder / name):
            asked = prompts[record[task] if in_field else task]
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
    engine: DeviceEngine,
    prompts: list[list[int]],
    streams: int,
    max_tokens: int,
    speculation: Speculation | None,
    asked_before: int = 0,
) -> Run:
    """Answer the prompts, so many at a time, without prefix cache; None drafts nothing.

    `asked_before` times the same loop has answered them before; that is not measured.
    """
    loop = HostLoop(engine, speculation=speculation)
    for _ in range(asked_before):
        _answer_all(loop, prompts, streams, max_tokens)
    before = loop.snapshot()
    started = time.perf_counter()
    outputs = _answer_all(loop, prompts, streams, max_tokens)
    seconds = time.perf_counter() - started
    snapshot = loop.snapshot()
    drafted = snapshot.speculation or SpeculationStatistics()
    return Run(
        outputs,
        seconds,
        snapshot.num_steps - before.num_steps,
        drafted if before.speculation is None else _since(before.speculation, drafted),
    )


def _since(before: SpeculationStatistics, now: SpeculationStatistics) -> SpeculationStatistics:
    """What has been counted between the two."""
    counted = ("num_verifications", "num_drafted", "num_accepted", "drafted_seconds", "plain_seconds")
    return replace(now, **{name: getattr(now, name) - getattr(before, name) for name in counted})


def _answer_all(
    loop: HostLoop, prompts: list[list[int]], streams: int, max_tokens: int
) -> list[RequestOutput]:
    waiting = list(enumerate(prompts))
    outputs: dict[str, RequestOutput] = {}
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    while waiting or not loop.idle:
        while waiting and loop.num_open < streams:
            number, prompt = waiting.pop(0)
            loop.add(str(number), prompt, params)
        for delta in loop.step():
            if delta.output is not None:
                outputs[delta.request_id] = delta.output
    return [outputs[str(number)] for number in range(len(prompts))]


def compare(task: str, streams: int, runs: list[tuple[Run, Run]]) -> Row:
    """The best of several runs without drafts and with them."""

    def best(side: int, rate: str) -> float:
        return max(getattr(run[side], rate) for run in runs)

    plain, drafting = max(runs, key=lambda run: run[1].rate)
    drafted = drafting.drafted
    return Row(
        task=task,
        streams=streams,
        plain_tokens_per_second=best(0, "rate"),
        drafted_tokens_per_second=best(1, "rate"),
        ratio=best(1, "rate") / best(0, "rate"),
        plain_answer_tokens_per_second=best(0, "answer_rate"),
        drafted_answer_tokens_per_second=best(1, "answer_rate"),
        answer_ratio=best(1, "answer_rate") / best(0, "answer_rate"),
        steps_ratio=plain.num_steps / drafting.num_steps,
        accepted_length=drafted.accepted_length,
        accepted_share=drafted.num_accepted / max(drafted.num_drafted, 1),
        seconds_saved=drafted.seconds_saved,
        num_same=sum(ours == theirs for ours, theirs in zip(plain.answers, drafting.answers, strict=True)),
        num_answers=len(plain.answers),
    )


def save(path: Path, rows: list[Row], **head: str) -> None:
    """The table so far, with what it was made by."""
    table = {"command": shlex.join(sys.argv[1:]), **head, "rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps(table, indent=1) + "\n")


def main() -> None:
    args = _parser().parse_args()
    model = open_model(args.model)
    options = EngineOptions(
        num_slots=max(args.streams),
        max_model_len=2048,
        dtype=args.dtype,
        quantize=args.quantize,
        kv_format=args.kv_format,
        deterministic=args.deterministic,
        speculative=args.speculative,
        draft_quantize=args.draft_quantize,
        max_drafts=args.max_drafts,
    )
    engine = model.build_engine(options)
    precision = precision_of(engine.config)
    machine = describe()
    invariant = engine.config.deterministic
    print(f"{machine}\n{args.model}, {precision}, {args.speculative}, deterministic={invariant}")
    print(_HEAD, flush=True)
    speculation = named_speculation(args.speculative, args.max_drafts)
    if speculation is not None and args.always:
        speculation = replace(speculation, adaptive=False)
    rows: list[Row] = []
    for task, texts in read_prompts(args.prompts, args.num_prompts).items():
        prompts = [encode(model.tokenizer, text) for text in texts]
        for streams in args.streams if task in args.tasks else ():
            runs = [
                (
                    answer(engine, prompts, streams, args.max_tokens, None, args.asked_before),
                    answer(
                        engine,
                        prompts,
                        streams,
                        args.max_tokens,
                        speculation,
                        args.asked_before,
                    ),
                )
                for _ in range(args.repeats)
            ]
            rows.append(compare(task, streams, runs))
            print(rows[-1], flush=True)
            if args.save:
                save(args.save, rows, machine=machine, precision=precision)
    print(
        f"the same: {sum(row.num_same for row in rows)} of {sum(row.num_answers for row in rows)} answers; "
        f"the least ratio of answers' speed: {min(row.answer_ratio for row in rows):.2f}"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("prompts", type=Path)
    add("--model", default="smollm2-135m")
    add("--num-prompts", type=int, default=4, help="of each task (default %(default)s)")
    add("--max-tokens", type=int, default=128, help="of an answer (default %(default)s)")
    add("--speculative", type=parse_speculative, default="ngram", help="what drafts (default %(default)s)")
    add("--draft-quantize", type=recipe_name, metavar="RECIPE", help="formats of a draft model's weights")
    add("--max-drafts", type=int, default=7, help="in a step (default %(default)s)")
    add("--always", action="store_true", help="verify drafts also where that does not pay")
    add("--streams", type=int, nargs="+", default=[1, 4], help="answers side by side")
    add("--tasks", nargs="+", choices=_TASKS, default=_TASKS)
    add("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    add("--quantize", type=recipe_name, metavar="RECIPE", help="formats of the weights")
    add("--kv-format", default="auto", help="numbers in the KV pool (default: those of the computation)")
    add(
        "--deterministic",
        action=argparse.BooleanOptionalAction,
        help="the shape-invariant mode (default: where that costs nothing)",
    )
    add(
        "--asked-before",
        type=int,
        default=0,
        metavar="TIMES",
        help="that all prompts of a task have been answered by the same loop (default %(default)s)",
    )
    add("--repeats", type=int, default=2, help="the best counts (default %(default)s)")
    add("--save", type=Path, metavar="FILE", help="where to write the table, as JSON")
    return parser


if __name__ == "__main__":
    main()
