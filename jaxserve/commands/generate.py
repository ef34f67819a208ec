"""`jaxserve generate`: one prompt, one answer, as it comes."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve.commands.command import add_verbose_argument, loading, say, shows_status
from jaxserve.commands.options import (
    add_engine_arguments,
    add_sampling_arguments,
    read_engine_settings,
    read_sampling,
    slots_on,
)
from jaxserve.commands.processes import add_process_arguments, follows, join_processes
from jaxserve.interrupts import interrupts_deferred

if TYPE_CHECKING:
    from jaxserve.offline import AnswerIterator
    from jaxserve.outputs import CompletionOutput, RequestMetrics, RequestOutput
    from jaxserve.prompts import Prompt
    from jaxserve.text import Tokenizer

_MAX_SLOTS = 16
"""More samples than this take turns."""
_DESCRIPTION = """Answers one prompt on standard output, as the text comes. The prompt is put through the
model's chat template, if it has one, so that an instruction-tuned model answers it; --raw has the model
continue the text instead."""


class Generate:
    name = "generate"
    help = "answer one prompt, as the text comes"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.description = _DESCRIPTION
        add = parser.add_argument
        add("model", metavar="MODEL", help="a catalogue name, a folder, a .gguf file or a hub id")
        source = parser.add_mutually_exclusive_group()
        source.add_argument("-p", "--prompt", metavar="TEXT", help="the prompt (default: standard input)")
        source.add_argument("-f", "--prompt-file", metavar="FILE", help="read it from a file, - for stdin")
        add("--system", metavar="TEXT", help="a system message before the prompt")
        add("--raw", action="store_true", help="continue the text as it is, without the chat template")
        add("--json", action="store_true", help="print one JSON object when the answer is complete")
        add("-n", "--n", type=int, default=1, metavar="N", help="so many samples (default %(default)s)")
        add("--logprobs", type=int, metavar="K", help="with K alternatives a token; needs --json")
        add_verbose_argument(parser)
        add_sampling_arguments(parser, max_tokens=256, temperature=0.0, top_p=1.0)
        add_engine_arguments(parser)
        add_process_arguments(parser)

    def run(self, args: argparse.Namespace) -> int:
        if args.logprobs is not None and not args.json:
            raise ValueError("--logprobs needs --json")
        params = read_sampling(args, n=args.n, logprobs=args.logprobs)
        job = join_processes(args)
        text = "" if follows(job) else _read_prompt(args)
        started = time.monotonic()
        with loading(args):
            from jaxserve.opened_model import open_model

            model = open_model(args.model, progress=shows_status(args))
            prompt = _prepare(args, text, model.tokenizer)
            with interrupts_deferred():  # Broken off in the middle, the import of jaxlib crashes.
                from jaxserve.llm import LLM

            settings = read_engine_settings(args, num_slots=slots_on(args.mesh, min(args.n, _MAX_SLOTS)))
            llm = LLM(model, progress=shows_status(args), **settings)
        with llm:
            load_seconds = time.monotonic() - started
            output = _answer(llm.stream(prompt, params), show=args.n == 1 and not args.json)
        if args.json:
            print(json.dumps(_report(args.model, text, output, load_seconds), ensure_ascii=False))
        elif args.n > 1:
            _print_samples(output)
        if shows_status(args):
            say(summarize(output.metrics, _num_tokens(output), load_seconds))
        return 0


def summarize(metrics: RequestMetrics, num_tokens: int, load_seconds: float | None = None) -> str:
    """One line of timings."""
    line = f"{num_tokens} tokens in {metrics.total_seconds:.2f} s"
    if metrics.first_token_seconds is not None:
        line += f", the first after {metrics.first_token_seconds:.2f} s"
    if (rate := _rate(metrics, num_tokens)) is not None:
        line += f", then {rate:.1f} a second"
    return line if load_seconds is None else f"{line}; ready in {load_seconds:.1f} s"


def _read_prompt(args: argparse.Namespace) -> str:
    """The prompt's text; a file's last newline belongs to the file."""
    if args.prompt is not None:
        text = args.prompt
    elif args.prompt_file not in {None, "-"}:
        text = Path(args.prompt_file).read_text(encoding="utf-8").removesuffix("\n")
    else:
        if sys.stdin.isatty():
            say("Type the prompt; end it with Ctrl-D on a line of its own.")
        text = sys.stdin.read().removesuffix("\n")
    if not text.strip() and not args.raw:
        raise ValueError("the prompt is empty")
    return text


def _prepare(args: argparse.Namespace, text: str, tokenizer: Tokenizer) -> Prompt:
    """The prompt as the model is to see it."""
    if args.raw or "default" not in tokenizer.chat_templates:
        if args.system is not None:
            raise ValueError("--system needs a model with a chat template, and no --raw")
        return text
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    rendered = tokenizer.render_chat([*system, {"role": "user", "content": text}])
    ids = tokenizer.encode(rendered, add_special_tokens=False)
    return {"prompt": rendered, "prompt_token_ids": ids}


def _answer(answer: AnswerIterator, *, show: bool) -> RequestOutput:
    """Read an answer to its end, on standard output as it comes if it is to be shown."""
    output: RequestOutput | None = None
    with answer:
        for delta in answer:
            output = delta.output
            if show:
                print(delta.text, end="", flush=True)
    assert output is not None, "the last delta has the output"
    if show and not output.outputs[0].text.endswith("\n"):
        print(flush=True)
    return output


def _print_samples(output: RequestOutput) -> None:
    for sample in output.outputs:
        print(f"--- sample {sample.index + 1} of {len(output.outputs)}")
        print(sample.text.removesuffix("\n"))


def _report(model: str, prompt: str, output: RequestOutput, load_seconds: float) -> dict[str, Any]:
    """What --json prints: the first sample, and all of them under `outputs` if there are several."""
    metrics, num_tokens = output.metrics, _num_tokens(output)
    report = {
        "model": model,
        "prompt": prompt,
        "prompt_token_ids": output.prompt_token_ids,
        **_sample_report(output.outputs[0]),
        "seed": output.seed,
        "usage": {
            "prompt_tokens": len(output.prompt_token_ids),
            "completion_tokens": num_tokens,
            "total_tokens": len(output.prompt_token_ids) + num_tokens,
        },
        "timings": {
            "load_seconds": load_seconds,
            "first_token_seconds": metrics.first_token_seconds,
            "total_seconds": metrics.total_seconds,
            "tokens_per_second": _rate(metrics, num_tokens),
        },
    }
    if len(output.outputs) > 1:
        report["outputs"] = [_sample_report(sample) for sample in output.outputs]
    return report


def _sample_report(sample: CompletionOutput) -> dict[str, Any]:
    report: dict[str, Any] = {
        "text": sample.text,
        "token_ids": sample.token_ids,
        "finish_reason": sample.finish_reason,
        "stop_reason": sample.stop_reason,
    }
    if sample.logprobs is not None:
        report["logprobs"] = [
            [{"token_id": token_id, **entry._asdict()} for token_id, entry in position.items()]
            for position in sample.logprobs
        ]
    return report


def _num_tokens(output: RequestOutput) -> int:
    return sum(len(sample.token_ids) for sample in output.outputs)


def _rate(metrics: RequestMetrics, num_tokens: int) -> float | None:
    """Tokens a second after the first one, None where there is no other."""
    if metrics.first_token_seconds is None or num_tokens < 2:
        return None
    seconds = metrics.total_seconds - metrics.first_token_seconds
    return (num_tokens - 1) / seconds if seconds > 0 else None
