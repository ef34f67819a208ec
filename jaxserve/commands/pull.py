"""`jaxserve pull`: fetch a model of the catalogue, or from the hub, ahead of its first use."""

from __future__ import annotations

import argparse

from jaxserve.commands.command import add_verbose_argument, shows_status


class Pull:
    name = "pull"
    help = "download a model and print where it is"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("model", metavar="NAME", help="a catalogue name (smollm2-135m) or a hub id")
        add_verbose_argument(parser)

    def run(self, args: argparse.Namespace) -> int:
        from jaxserve.weights import resolve_model

        print(resolve_model(args.model, progress=shows_status(args)))
        return 0
