"""The command line: finds the command, runs it, turns errors into a sentence and an exit status.

Exit status: 0 for success, 1 where what was checked did not pass, 2 for wrong usage or bad input, 130 after
Ctrl-C, 141 where the reader of the output has gone; an error of the program itself ends with a traceback and
status 1.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NoReturn

from jaxserve.commands import BUILT_IN, Command
from jaxserve.interrupts import leave_at_once
from jaxserve.version import __version__

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINT_GROUP = "jaxserve.commands"

_BAD_INPUT = 2
_INTERRUPTED = 130
_BROKEN_PIPE = 141


def run() -> NoReturn:
    """Be the process of a command: `main` with its arguments, and the end with its status."""
    status = main()
    if status == _INTERRUPTED:
        leave_at_once(status)  # An interrupted compile goes on, and takes what an orderly end frees.
    sys.exit(status)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `jaxserve` with these arguments, by default the process's; return the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _build_parser(arguments)
    args = parser.parse_args(arguments)
    _prepare_output(getattr(args, "verbose", False))
    try:
        status = args.run(args)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # Whatever is still buffered would fail again when the interpreter flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    except KeyboardInterrupt:
        return _INTERRUPTED
    except (ValueError, OSError, *_pull_errors()) as error:
        if getattr(args, "verbose", False):
            logging.getLogger(__name__).info("where it happened", exc_info=error)
        print(f"jaxserve {args.command}: error: {_sentence(error)}", file=sys.stderr)
        return _BAD_INPUT


def _sentence(error: Exception) -> str:
    """The error without Python's way of putting a file's."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        hint = "; make it readable for this user" if isinstance(error, PermissionError) else ""
        return f"{error.filename}: {error.strerror.lower()}{hint}"
    return str(error)


def _build_parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """A parser that knows the built-in commands, and the added ones as far as these arguments need them."""
    parser = argparse.ArgumentParser(
        prog="jaxserve",
        description="LLM inference on JAX for TPU, GPU and CPU.",
        epilog="`jaxserve COMMAND --help` explains a command.",
    )
    parser.add_argument("--version", action="version", version=f"jaxserve {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, title="commands")
    for command in (*BUILT_IN, *_added_commands(_named_command(arguments))):
        subparser = subparsers.add_parser(command.name, help=command.help)
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    return parser


def _named_command(arguments: Iterable[str]) -> str | None:
    """The first argument that is no option: the top level has none that takes a value."""
    return next((argument for argument in arguments if not argument.startswith("-")), None)


def _added_commands(named: str | None) -> list[Command]:
    """Commands of other packages: the named one, or all of them where there is no such command to name."""
    built_in = {command.name for command in BUILT_IN}
    if named in built_in:
        return []
    import importlib.metadata  # takes as long as all the rest of a start

    entry_points = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    unique = {entry.name: entry for entry in entry_points if entry.name not in built_in}
    return [_load(unique[name]) for name in sorted(unique) if named not in unique or name == named]


def _load(entry_point: EntryPoint) -> Command:
    """The command behind an entry point; one that cannot be loaded says so when it is listed or run."""
    try:
        return entry_point.load()
    except (ImportError, AttributeError) as error:
        return _BrokenCommand(entry_point.name, f"cannot load {entry_point.value}: {error}")


class _BrokenCommand:
    """Stands for a command of another package that cannot be loaded."""

    def __init__(self, name: str, reason: str) -> None:
        self.name = name
        self.help = f"({reason})".replace("%", "%%")
        self._reason = reason

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("arguments", nargs=argparse.REMAINDER)

    def run(self, args: argparse.Namespace) -> int:
        raise ValueError(self._reason)


def _pull_errors() -> tuple[type[Exception], ...]:
    """PullError, once what can raise it has been imported: an error's way out imports nothing."""
    catalogue = sys.modules.get("jaxserve.weights.catalogue")
    return (catalogue.PullError,) if catalogue else ()


def _prepare_output(verbose: bool) -> None:
    """Logs go to standard error; a character that a terminal cannot show becomes a question mark."""
    logging.basicConfig(format="%(name)s: %(message)s")
    logging.getLogger("jaxserve").setLevel(logging.INFO if verbose else logging.WARNING)
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")
