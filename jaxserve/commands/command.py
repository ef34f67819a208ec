"""What a command is, built in or added by another package, and what all of them say alike."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from jaxserve.interrupts import interrupts_kept


class Command(Protocol):
    """A subcommand of `jaxserve`.

    Other packages add one through an entry point in the group `jaxserve.commands`: the entry point's name
    is the command's, and it loads to an object like this. It is loaded only when the command is named, or
    for the list that `jaxserve --help` prints, so whatever is expensive is imported in `run`.
    """

    name: str
    help: str
    """One line for the list of commands."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the command's arguments."""
        ...

    def run(self, args: argparse.Namespace) -> int:
        """Do it; return the exit status.

        A ValueError or an OSError becomes one sentence and the status 2.
        """
        ...


def add_verbose_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="status and timings on standard error even where it is no terminal, and a traceback of errors",
    )


def shows_status(args: argparse.Namespace) -> bool:
    """Whether bars and timings belong on standard error."""
    return args.verbose or sys.stderr.isatty()


@contextmanager
def loading(args: argparse.Namespace) -> Iterator[None]:
    """Around all that makes `args.model` ready: says so at once, and no Ctrl-C is lost in it."""
    if shows_status(args):
        say(f"loading {args.model}")
    with interrupts_kept():
        yield


def say(text: str) -> None:
    """A line for the user, on standard error."""
    print(text, file=sys.stderr, flush=True)
