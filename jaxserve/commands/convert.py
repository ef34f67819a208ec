"""`jaxserve convert`: a model as the engine has it, written once to start from fast."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from jaxserve.commands.command import add_verbose_argument, shows_status

if TYPE_CHECKING:
    from jaxserve.converted import Calibration
    from jaxserve.opened_model import OpenedModel
    from jaxserve.quantization import Recipe


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
        add(
            "--calibrate",
            type=Path,
            metavar="TEXT",
            help="smooth int8 and w8a8 by what the model makes of TEXT",
        )
        add(
            "--calibrate-tokens",
            type=int,
            metavar="N",
            help="read so much of TEXT (default: 8192, or all of it)",
        )
        add(
            "--smooth-alpha",
            type=float,
            metavar="A",
            help="how much of the activations' range moves into the weights, 0 to 1 (default: 0.5)",
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
            return self._convert(args, model)
        if isinstance(model.checkpoint, Checkpoint):
            raise ValueError(f"{args.model} is not a converted model: it has no hashes to compare with")
        model.checkpoint.verify()
        print(f"{model.checkpoint.path}: every file is as it was written")
        return 0

    def _convert(self, args: argparse.Namespace, model: OpenedModel) -> int:
        from jaxserve.converted import convert
        from jaxserve.interrupts import interrupts_kept
        from jaxserve.progress import StageBars
        from jaxserve.quantization import recipe_named

        recipe = recipe_named(args.quantize) if args.quantize else None
        calibration = _read_calibration(args, model, recipe)
        with interrupts_kept() as check_interrupt, StageBars(shows_status(args)) as bars:

            def on_progress(stage: str, done: int, total: int) -> None:
                check_interrupt()
                bars(stage, done, total)

            manifest = convert(
                model.checkpoint,
                args.out,
                recipe=recipe,
                compute_format=None if args.dtype == "auto" else args.dtype,
                calibration=calibration,
                on_progress=on_progress,
            )
        size = sum(entry.num_bytes for entry in manifest.files.values())
        precision = manifest.recipe or manifest.compute_format
        if manifest.calibration:
            precision += f" {manifest.calibration.label}"
        print(f"{args.out}: {precision}, {size / 1e6:.1f} MB")
        return 0


def _read_calibration(
    args: argparse.Namespace, model: OpenedModel, recipe: Recipe | None
) -> Calibration | None:
    """Raises ValueError, naming the option, for a text or a setting that will not do."""
    from jaxserve.converted import read_calibration
    from jaxserve.weights import Checkpoint

    if args.calibrate is None:
        for name in ("calibrate_tokens", "smooth_alpha"):
            if getattr(args, name) is not None:
                raise ValueError(f"--{name.replace('_', '-')} needs a text: --calibrate TEXT")
        return None
    if not isinstance(model.checkpoint, Checkpoint):
        return None  # Which the conversion refuses, calibrated or not.
    try:
        text = args.calibrate.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{args.calibrate}: no UTF-8 text: {error.reason} at byte {error.start}") from error
    return read_calibration(
        model.checkpoint,
        model.tokenizer,
        text,
        recipe=recipe,
        alpha=0.5 if args.smooth_alpha is None else args.smooth_alpha,
        num_tokens=args.calibrate_tokens,
    )
