"""`jaxserve batch`: a file of requests to a model, and a file of its answers."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve.commands.command import add_verbose_argument, loading, say, shows_status
from jaxserve.commands.options import add_engine_arguments, read_engine_settings
from jaxserve.commands.processes import add_process_arguments, follows, join_processes
from jaxserve.interrupts import interrupts_deferred
from server.command import add_answer_arguments
from server.route_arguments import model_name

if TYPE_CHECKING:
    from jaxserve.config import EngineConfig
    from jaxserve.engine.options import EngineOptions
    from jaxserve.loop import HostLoop
    from jaxserve.opened_model import OpenedModel
    from jaxserve.run_manifest import RunManifest
    from server.batch.files import BatchFiles
    from server.batch.requests import Preparer
    from server.batch.run import BatchReport

SOME_FAILED = 3
"""Exit status where a line got an error for an answer."""
CPU_SLOTS = 32
"""Sequences at once. SmolLM2-135M in int8 gives 6 % more tokens than with 16 (README, on two cores)."""
DEVICE_SLOTS = 256

_DESCRIPTION = """Answers a batch in OpenAI's format: JSON lines of custom_id, method, url
(/v1/chat/completions or /v1/completions) and body, or a .parquet file with these columns. Answers are written
as they come, in no particular order, each a line of id, custom_id, response and error; to a .parquet file
when the last one has come. The same command takes up a run that was broken off. A line that cannot be
answered gets a record that says why, the rest go on, and the exit status is 3. Requests without a seed get
one from --seed and their line, so that running a batch again gives the same answers."""
_MANIFEST_HELP = """where all is written down that can change an answer or its speed, and that a run is held
to which takes this one up; answers have its hash as system_fingerprint (default: OUT.manifest.json). A later
run that differs in speed alone writes one of its own beside it, with the hash in its name"""


class Batch:
    name = "batch"
    help = "answer a file of requests, in OpenAI's batch format"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.description = _DESCRIPTION
        add = parser.add_argument
        add("model", metavar="MODEL", help="a catalogue name, a folder, a .gguf file or a hub id")
        add("batch", metavar="IN", type=Path, help="the requests, a .jsonl or .parquet file")
        add("answers", metavar="OUT", type=Path, help="the answers, likewise; or those of a run to take up")
        add("--name", metavar="NAME", help="what requests call the model (default: as MODEL says)")
        add("--num-slots", type=int, metavar="N", help="sequences that run at once (default: by machine)")
        add(
            "--read-ahead",
            type=int,
            default=1024,
            metavar="N",
            help="lines to choose from, so that prompts that begin alike meet (default %(default)s)",
        )
        add("--seed", type=int, default=0, metavar="N", help="see above (default %(default)s)")
        add_answer_arguments(parser)
        add("--manifest", type=Path, metavar="FILE", help=_MANIFEST_HELP)
        add_verbose_argument(parser)
        add_engine_arguments(parser)
        add_process_arguments(parser)

    def run(self, args: argparse.Namespace) -> int:
        if args.read_ahead < 1:
            raise ValueError(f"--read-ahead {args.read_ahead} is below 1")
        if follows(join_processes(args)):
            return _follow(args)
        from server.batch.files import BatchFiles

        with BatchFiles(args.batch, args.answers) as files:
            report = _answer(args, files) if files.num_left else None
            files.finish()
            num_failed = files.ledger.num_failed
            print(_summary(args, files, report), flush=True)
        return SOME_FAILED if num_failed else 0


def _answer(args: argparse.Namespace, files: BatchFiles) -> BatchReport:
    from jaxserve.progress import RequestBar

    with loading(args):
        with interrupts_deferred():  # Broken off in the middle, the import of jaxlib crashes.
            from jaxserve.offline import OfflineLoop
            from jaxserve.structured import CheckLostError
            from server.batch.run import BatchRun
            from server.core import ServiceError
        preparer, loop, fingerprint = _load(args, files)
    shown, done = shows_status(args), files.ledger.num_answered
    try:
        with RequestBar(shown, files.num_lines, done=done) as bar:
            return BatchRun(
                files,
                preparer,
                OfflineLoop(loop),
                num_slots=loop.limits.num_slots,
                read_ahead=args.read_ahead,
                fingerprint=fingerprint,
                on_progress=bar,
            ).run()
    except KeyboardInterrupt:
        say(_how_to_go_on(files))
        raise
    except (ServiceError, CheckLostError) as error:
        raise ValueError(f"{error}; {_how_to_go_on(files)}") from error


def _follow(args: argparse.Namespace) -> int:
    """Load what the first process loads, and do as it says until it ends; files are its alone."""
    with loading(args):
        model, options = _open(args)
        model.configure(options)  # As it does: all processes must be asked how much memory they have.
        model.build_engine(options, progress=False)
    raise AssertionError("a process that follows answers nothing itself")


def _how_to_go_on(files: BatchFiles) -> str:
    return f"{files.ledger.num_answered} of {files.num_lines} lines have answers; the same command goes on"


def _load(args: argparse.Namespace, files: BatchFiles) -> tuple[Preparer, HostLoop, str]:
    """The model, ready to answer, and the hash of its manifest."""
    from jaxserve.opened_model import loop_of
    from server.batch.manifest import KeptManifest
    from server.batch.requests import Preparer
    from server.core.intake import Intake
    from server.http.tool_speech import ToolSpeech

    path = args.manifest or args.answers.with_name(f"{args.answers.name}.manifest.json")
    kept = KeptManifest(path, first=not files.ledger.num_answered)
    model, options = _open(args)
    kept.check(_manifest(args, model, options, model.configure(options)))  # before the weights are read
    engine = model.build_engine(options, progress=shows_status(args))
    manifest = _manifest(args, model, options, engine.config, engine.kernels)
    kept.keep(manifest)
    loop = loop_of(model, engine, options, prefix_caching=args.prefix_cache)
    preparer = Preparer(
        _name(args),
        model.tokenizer,
        loop,
        Intake(model.tokenizer, loop.limits, _sampling_defaults(args, model)),
        ToolSpeech(args.tool_parser),
        seed=args.seed,
    )
    return preparer, loop, manifest.digest


def _open(args: argparse.Namespace) -> tuple[OpenedModel, EngineOptions]:
    """The model, of which no weights are read yet, and how it is to run."""
    import jax

    from jaxserve.engine.options import engine_options
    from jaxserve.opened_model import open_model

    slots = args.num_slots or (CPU_SLOTS if jax.default_backend() == "cpu" else DEVICE_SLOTS)
    options = engine_options(read_engine_settings(args, num_slots=slots))
    return open_model(args.model, progress=shows_status(args)), options


def _manifest(
    args: argparse.Namespace,
    model: OpenedModel,
    options: EngineOptions,
    config: EngineConfig,
    kernels: Mapping[str, str] | None = None,
) -> RunManifest:
    """All that can change an answer or its speed; the kernels as far as they are known."""
    from jaxserve.run_manifest import BATCH_PART

    manifest = model.manifest(
        config,
        options,
        kernels=kernels,
        prefix_caching=args.prefix_cache,
        sampling_defaults=_sampling_defaults(args, model),
    )
    own = {"name": _name(args), "seed": args.seed, "tool_parser": args.tool_parser}
    return manifest.extended(BATCH_PART, own)


def _name(args: argparse.Namespace) -> str:
    """What requests call the model."""
    return args.name or model_name(args.model)


def _sampling_defaults(args: argparse.Namespace, model: OpenedModel) -> Mapping[str, Any]:
    return model.sampling_defaults if args.generation_config == "auto" else {}


def _summary(args: argparse.Namespace, files: BatchFiles, report: BatchReport | None) -> str:
    num_failed = files.ledger.num_failed
    line = f"{args.answers}: {files.num_lines - num_failed} answers, {num_failed} errors"
    if report is None:
        return f"{line}; nothing was left to do"
    rate = report.num_tokens / max(report.seconds, 1e-9)
    line += f"; {report.num_tokens} tokens in {report.seconds:.1f} s, {rate:.1f} a second"
    if report.num_cached_tokens:
        line += f"; {report.num_cached_tokens} of {report.num_prompt_tokens} prompt tokens reused"
    return line


BATCH = Batch()
"""The entry point."""
