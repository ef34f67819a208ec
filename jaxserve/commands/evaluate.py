"""`jaxserve evaluate`: a model against a reference, by slice, held to floors."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from jaxserve.commands.command import add_verbose_argument, loading, say, shows_status
from jaxserve.commands.options import add_engine_arguments, read_engine_settings
from jaxserve.config import FloatFormat, KvFormat
from jaxserve.interrupts import interrupts_deferred

if TYPE_CHECKING:
    from jaxserve.engine.build import EngineOptions
    from jaxserve.evaluation import Plan, Text
    from jaxserve.opened_model import OpenedModel
    from jaxserve.text import Tokenizer

_DESCRIPTION = """Measures a model against a reference, which by default is the same model in float32: the
perplexity of texts, the divergence and the top-1 agreement of next-token distributions, greedy answers to
prompts, and numbers hidden in long texts. Every figure is by slice. With floors the exit status is 1 if one
is missed. Numerics are shape-invariant unless --no-deterministic is given."""
_FLOORS = """A floor is MEASURE=VALUE, for every slice that has the measure, or SLICE:MEASURE=VALUE. At most
that may be: perplexity (the model's over the reference's), perplexity-change, kl, kl-p99 (nats), exact-loss,
schema-loss, instructions-loss, needle-loss (the reference's share less the model's), refusals-change. At
least that must be: top1, exact, schema, instructions, needle, agreement, identical (shares, from 0 to 1)."""
_SHARED_SETTINGS = ("max_model_len", "max_chunk", "kv_memory", "deterministic", "num_slots", "mesh")
"""What the reference runs with as the model does; its numbers it has of its own."""


class Evaluate:
    name = "evaluate"
    help = "measure a model against a reference, and hold it to floors"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.description, parser.epilog = _DESCRIPTION, _FLOORS
        add = parser.add_argument
        add("model", metavar="MODEL", help="a catalogue name, a folder, a .gguf file or a hub id")
        add("--against", metavar="REFERENCE", help="the model to compare with (default: MODEL in float32)")
        dtypes, kv_formats = get_args(FloatFormat), get_args(KvFormat)
        add("--reference-dtype", default="float32", choices=dtypes, help="of its weights and activations")
        add("--reference-kv-format", default="float32", choices=kv_formats, help="of its KV pool")
        add("--text", nargs="+", default=[], type=Path, metavar="FILE", help="texts to read; a slice each")
        add("--max-tokens", type=int, metavar="N", help="read so much of each text (default: all)")
        add("--context", type=int, default=512, metavar="N", help="tokens of a window (default %(default)s)")
        add("--prompts", nargs="+", default=[], type=Path, metavar="FILE", help="prompt sets, as JSON lines")
        add("--limit", type=int, metavar="N", help="so many prompts of each file (default: all)")
        add(
            "--answer-tokens",
            type=int,
            default=256,
            metavar="N",
            help="longest answer (default %(default)s)",
        )
        add("--slots", type=int, default=16, metavar="N", help="prompts at once (default %(default)s)")
        add("--needle", nargs="+", default=[], type=int, metavar="LENGTH", help="hide numbers in such texts")
        add("--needle-depths", type=int, default=5, metavar="N", help="places in each (default %(default)s)")
        add("--seed", type=int, default=0, metavar="N", help="of those texts (default %(default)s)")
        add("--floor", action="append", default=[], metavar="FLOOR", help="see below; may be repeated")
        add("--json", type=Path, metavar="FILE", help="write the report there")
        add_verbose_argument(parser)
        add_engine_arguments(parser)
        parser.set_defaults(deterministic=True)

    def run(self, args: argparse.Namespace) -> int:
        for name in ("max_tokens", "limit", "answer_tokens", "slots"):
            value = getattr(args, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} {value} is below 1")
        if args.json is not None and not args.json.parent.is_dir():  # Not after hours of work.
            raise ValueError(f"--json {args.json}: there is no folder {args.json.parent}")
        with loading(args):
            with interrupts_deferred():  # Broken off in the middle, the import of jaxlib crashes.
                from jaxserve.evaluation import Side, evaluate
            from jaxserve.opened_model import open_model

            plan = _read_plan(args)
            shown = shows_status(args)
            opened = open_model(args.model, progress=shown)
            if args.against is None:
                _require_plain(opened)
            against = opened if args.against is None else open_model(args.against, progress=shown)
            model_options, reference_options = _options(args)
            model = Side(args.model, opened, model_options, progress=shown)
            reference = Side(args.against or args.model, against, reference_options, progress=shown)
            plan = _with_needles(args, plan, opened.tokenizer)
        report = evaluate(model, reference, plan, progress=shown)
        print(report.table(), flush=True)
        if args.json is not None:
            args.json.write_text(report.to_json() + "\n", encoding="utf-8")
        for verdict in report.failures:
            say(f"jaxserve evaluate: floor missed: {verdict}")
        return 0 if report.passed else 1


def _require_plain(model: OpenedModel) -> None:
    """Raise ValueError for a model that has been quantised, whose float32 is the quantised one."""
    from jaxserve.weights import ConvertedCheckpoint

    checkpoint = model.checkpoint
    if isinstance(checkpoint, ConvertedCheckpoint) and checkpoint.recipe:
        raise ValueError(
            f"{checkpoint.path} has been quantised ({checkpoint.recipe}) and would be compared with itself; "
            "name the model that it was made from: --against"
        )


def _options(args: argparse.Namespace) -> tuple[EngineOptions, EngineOptions]:
    """How the model runs, and how the reference does."""
    from jaxserve.engine.build import EngineOptions, engine_options

    settings = read_engine_settings(args, num_slots=args.slots)
    shared: Any = {name: settings.get(name) for name in _SHARED_SETTINGS}
    own = {"dtype": args.reference_dtype, "kv_format": args.reference_kv_format}
    return engine_options(settings), EngineOptions(**shared, **own)


def _read_plan(args: argparse.Namespace) -> Plan:
    """All that is to be measured but the needles, which only a tokenizer can measure out."""
    from jaxserve.evaluation import Floor, Plan, read_prompt_set

    return Plan(
        texts=_read_texts(args.text),
        cases=[case for path in args.prompts for case in read_prompt_set(path, args.limit)],
        floors=[Floor.parse(text) for text in args.floor],
        context=args.context,
        max_tokens=args.max_tokens,
        answer_tokens=args.answer_tokens,
    )


def _read_texts(paths: Sequence[Path]) -> list[Text]:
    """Raises ValueError, naming the file, for one without text or a name that another has."""
    from jaxserve.evaluation import Text

    texts: dict[str, Text] = {}
    for path in paths:
        try:
            content = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: no UTF-8 text: {error.reason} at byte {error.start}") from error
        if not content.strip():
            raise ValueError(f"{path}: the text is empty")
        name = f"text/{path.stem}"
        if name in texts:
            raise ValueError(f"{path}: another text has the name {path.stem} already")
        texts[name] = Text(name, content)
    return list(texts.values())


def _with_needles(args: argparse.Namespace, plan: Plan, tokenizer: Tokenizer) -> Plan:
    from jaxserve.evaluation import make_needles

    def count_tokens(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    needles = make_needles(count_tokens, args.needle, num_depths=args.needle_depths, seed=args.seed)
    return dataclasses.replace(plan, needles=needles)
