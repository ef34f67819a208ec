"""`jaxserve convert`: a model as the engine has it, written once to start from fast."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from jaxserve.commands.command import add_verbose_argument, shows_status

if TYPE_CHECKING:
    from jaxserve.weights import AnyCheckpoint


class Convert:
    name = "convert"
    help = "write a model once, quantised or not, to start from"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.description = (
            "Writes an Orbax checkpoint with tokenizer, chat template, recipe and hashes to a new folder, "
            "which every command takes for a MODEL. What is interrupted leaves no folder."
        )
        add = parser.add_argument
        add("model", metavar="SOURCE", help="a catalogue name, a folder, a .gguf file or a hub id")
        add("out", metavar="OUT", nargs="?", type=Path, help="a folder that does not exist yet")
        add("--quantize", metavar="RECIPE", help="of the weights: int8, fp8, int4, ... (default: none)")
        add(
            "--dtype",
            default="auto",
            choices=["auto", "float32", "bfloat16"],
            help="of what is not quantised (default: as in the source, if that is bfloat16, else float32)",
        )
        add("--verify", action="store_true", help="instead: compare the converted SOURCE with its hashes")
        add_verbose_argument(parser)

    def run(self, args: argparse.Namespace) -> int:
        from jaxserve.opened_model import open_model
        from jaxserve.weights import Checkpoint

        if args.verify == (args.out is not None):
            raise ValueError("name a folder to write to, OUT, or ask for --verify; one of the two")
        model = open_model(args.model, progress=shows_status(args))
        if not args.verify:
            return self._convert(args, model.checkpoint)
        if isinstance(model.checkpoint, Checkpoint):
            raise ValueError(f"{args.model} is not a converted model: it has no hashes to compare with")
        model.checkpoint.verify()
        print(f"{model.checkpoint.path}: every file is as it was written")
        return 0

    def _convert(self, args: argparse.Namespace, checkpoint: AnyCheckpoint) -> int:
        from jaxserve.converted import convert
        from jaxserve.interrupts import interrupts_kept
        from jaxserve.progress import StageBars
        from jaxserve.quantization import recipe_named

        recipe = recipe_named(args.quantize) if args.quantize else None
        with interrupts_kept() as check_interrupt, StageBars(shows_status(args)) as bars:

            def on_progress(done: int, total: int) -> None:
                check_interrupt()
                bars("convert", done, total)

            manifest = convert(
                checkpoint,
                args.out,
                recipe=recipe,
                compute_format=None if args.dtype == "auto" else args.dtype,
                on_progress=on_progress,
            )
        size = sum(entry.num_bytes for entry in manifest.files.values())
        print(f"{args.out}: {manifest.recipe or manifest.compute_format}, {size / 1e6:.1f} MB")
        return 0
