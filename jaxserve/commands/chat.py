"""`jaxserve chat`: a conversation at the terminal."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import TYPE_CHECKING

from jaxserve.commands.command import add_verbose_argument, loading, say, shows_status
from jaxserve.commands.generate import summarize
from jaxserve.commands.options import (
    add_engine_arguments,
    add_sampling_arguments,
    read_engine_settings,
    read_sampling,
    slots_on,
)
from jaxserve.commands.processes import add_process_arguments, join_processes
from jaxserve.interrupts import interrupts_deferred

if TYPE_CHECKING:
    from jaxserve.llm import LLM
    from jaxserve.outputs import RequestOutput
    from jaxserve.plan import SamplingParams

_DESCRIPTION = """Talks with a model, which sees the whole conversation at every turn. Ctrl-C stops an
answer, whose beginning stays in the conversation; /reset starts a new conversation; /exit or Ctrl-D
leaves."""
_COMMANDS = "/reset starts a new conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer"


class Chat:
    name = "chat"
    help = "talk with a model, turn by turn"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.description = _DESCRIPTION
        parser.add_argument(
            "model", metavar="MODEL", help="a catalogue name, a folder, a .gguf file or a hub id"
        )
        parser.add_argument("--system", metavar="TEXT", help="a system message before the conversation")
        add_verbose_argument(parser)
        # Greedy answers of small models soon repeat themselves over the turns of a conversation.
        add_sampling_arguments(parser, max_tokens=1024, temperature=0.7, top_p=0.95)
        add_engine_arguments(parser)
        add_process_arguments(parser)

    def run(self, args: argparse.Namespace) -> int:
        params = read_sampling(args)
        join_processes(args)
        with loading(args):
            from jaxserve.opened_model import open_model

            model = open_model(args.model, progress=shows_status(args))
            if "default" not in model.tokenizer.chat_templates:
                raise ValueError(f"{args.model} has no chat template: use `jaxserve generate`")
            with interrupts_deferred():  # Broken off in the middle, the import of jaxlib crashes.
                from jaxserve.llm import LLM

            settings = read_engine_settings(args, num_slots=slots_on(args.mesh, 1))
            # In processes after the first it does not return.
            llm = LLM(model, progress=shows_status(args), **settings)
        with llm:
            conversation = _Conversation(llm, params, args.system, timings=args.verbose)
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 - gives input() line editing and a history
            if sys.stdin.isatty():
                say(f"({_COMMANDS})")
            while conversation.turn():
                pass
        return 0


class _Conversation:
    """The messages so far, and how the next turn changes them."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None, *, timings: bool) -> None:
        self._llm = llm
        self._params = params
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self._messages = [*self._opening]
        self._timings = timings

    def turn(self) -> bool:
        """Read a line and do what it says; False when the user leaves."""
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            if sys.stdin.isatty():
                print()
            return False
        except KeyboardInterrupt:
            print()
            say(f"({_COMMANDS})")
            return True
        if line == "/exit":
            return False
        if line == "/reset":
            self._messages = [*self._opening]
            say("(a new conversation)")
        elif line.startswith("/"):
            say(f"({line.split()[0]} is no command: {_COMMANDS})")
        elif line:
            self._ask(line)
        return True

    def _ask(self, text: str) -> None:
        """Add a message and its answer, or neither if the conversation would no longer fit."""
        messages = [*self._messages, {"role": "user", "content": text}]
        said: list[str] = []
        output: RequestOutput | None = None
        try:
            try:
                answer = self._llm.stream_chat(messages, self._params)
            except ValueError as error:
                say(f"({error}; /reset starts a new conversation)")
                return
            with answer:
                for delta in answer:
                    said.append(delta.text)
                    output = delta.output
                    print(delta.text, end="", flush=True)
            print(flush=True)
        except KeyboardInterrupt:
            print(flush=True)
            say("(stopped)")
        self._messages = [*messages, {"role": "assistant", "content": "".join(said)}]
        if output is not None:
            self._remark(output)

    def _remark(self, output: RequestOutput) -> None:
        """Say what the answer's text does not show."""
        sample = output.outputs[0]
        num_tokens = len(sample.token_ids)
        if sample.finish_reason == "length" and num_tokens != self._params.max_tokens:
            say(
                f"(the conversation has reached the limit of {self._llm.limits.max_model_len} tokens: "
                "/reset starts a new one)"
            )
        elif sample.finish_reason == "length":
            say(f"(cut off at {num_tokens} tokens: --max-tokens)")
        if self._timings:
            say(summarize(output.metrics, num_tokens))
