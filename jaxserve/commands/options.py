"""Arguments that several commands share: how to sample, and what engine to build."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING, Any, get_args

from jaxserve.config import KvFormat
from jaxserve.quantization import RECIPES, recipe_named
from jaxserve.speculation import SPECULATIVE_HELP, read_speculative

if TYPE_CHECKING:
    from jaxserve.opened_model import EngineSettings
    from jaxserve.plan import SamplingParams

_SIZE = re.compile(r"(\d+(?:\.\d+)?)([KMGT]?)(?:i?B)?", re.IGNORECASE)
_UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}

_ENGINE_ARGUMENTS = (
    "max_model_len",
    "kv_memory",
    "host_kv_memory",
    "dtype",
    "quantize",
    "kv_format",
    "deterministic",
    "max_chunk",
    "speculative",
    "mesh",
    "prefill_mesh",
    "draft_quantize",
)
_SAMPLING_ARGUMENTS = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "ignore_eos",
    "stop",
)


def add_sampling_arguments(
    parser: argparse.ArgumentParser, *, max_tokens: int, temperature: float, top_p: float
) -> None:
    """The keyword arguments are the command's defaults. Ranges are checked by SamplingParams."""
    group = parser.add_argument_group("sampling")
    add = group.add_argument
    add(
        "--max-tokens",
        type=int,
        default=max_tokens,
        metavar="N",
        help="longest answer, cut to what the context leaves (default %(default)s)",
    )
    add("--min-tokens", type=int, default=0, metavar="N", help="shortest answer (default %(default)s)")
    add(
        "--temperature",
        type=float,
        default=temperature,
        metavar="T",
        help="0 takes the most likely token, the same answer every time; higher is more varied "
        "(default %(default)s)",
    )
    add("--top-k", type=int, default=0, metavar="K", help="sample among the K most likely tokens")
    add(
        "--top-p",
        type=float,
        default=top_p,
        metavar="P",
        help="sample among the most likely tokens that make up P (default %(default)s)",
    )
    add("--min-p", type=float, default=0.0, metavar="P", help="drop tokens below P times the most likely")
    add("--repetition-penalty", type=float, default=1.0, metavar="X", help="above 1 discourages repetition")
    add("--presence-penalty", type=float, default=0.0, metavar="X", help="from -2 to 2")
    add("--frequency-penalty", type=float, default=0.0, metavar="X", help="from -2 to 2")
    add("--seed", type=int, metavar="N", help="same seed, same answer (default: a fresh one)")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated")
    add("--ignore-eos", action="store_true", help="do not end where the model would")


def read_sampling(args: argparse.Namespace, **further: Any) -> SamplingParams:
    """The parameters that the arguments name. Raises ValueError for one that is out of range."""
    from jaxserve.plan import SamplingParams

    return SamplingParams(**{name: getattr(args, name) for name in _SAMPLING_ARGUMENTS}, **further)


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    add = group.add_argument
    add("--max-model-len", type=int, metavar="N", help="longest sequence in tokens (default: the model's)")
    add("--max-chunk", type=int, metavar="N", help="most prompt tokens in a step (default: by machine)")
    add("--kv-memory", type=parse_size, metavar="SIZE", help="of the KV pool: bytes, or as 512M, 2G")
    add(
        "--host-kv-memory",
        type=parse_size,
        metavar="SIZE",
        help="of the host, for what the KV pool has no room for (default: none)",
    )
    add("--dtype", default="auto", choices=["auto", "float32", "bfloat16"], help="of weights and activations")
    add(
        "--quantize",
        type=recipe_name,
        metavar="RECIPE",
        help=f"number formats of the weights: {', '.join(RECIPES)}, a format, or rules by parameter name "
        "(head=int8,*=int4-64); default: their own, or --dtype",
    )
    add("--kv-format", "--kv", default="auto", choices=["auto", *get_args(KvFormat)], help="of the KV pool")
    add(
        "--mesh",
        type=parse_mesh_option,
        metavar="AXES",
        help="devices that share the model: tensor=N, expert=N, pipe=N, data=N for replicas, with commas, or "
        "auto (default: one)",
    )
    add(
        "--prefill-mesh",
        type=parse_mesh_option,
        metavar="AXES",
        help="further devices, that compute prompts for those of --mesh, as tensor=N (default: none)",
    )
    add("--speculative", type=parse_speculative, metavar="HOW", help=f"draft answers, {SPECULATIVE_HELP}")
    add(
        "--draft-quantize",
        type=recipe_name,
        metavar="RECIPE",
        help="number formats of a draft model's weights (default: as --quantize)",
    )
    add(
        "--deterministic",
        action=argparse.BooleanOptionalAction,
        help="numerics that do not depend on how work is batched (default: where that costs nothing)",
    )


def read_engine_settings(args: argparse.Namespace, *, num_slots: int) -> EngineSettings:
    """Keyword arguments for an engine of so many sequences; few slots compile few shapes and start fast."""
    settings: Any = {name: getattr(args, name) for name in _ENGINE_ARGUMENTS} | {"num_slots": num_slots}
    return settings


def slots_on(mesh: str | None, num_sequences: int) -> int:
    """Fewest slots for so many sequences: on a mesh with replicas all have equally many."""
    from jaxserve.engine.mesh import AUTO
    from sharding import DATA, parse_mesh

    num_replicas = dict(parse_mesh(mesh)).get(DATA, 1) if mesh not in (None, AUTO) else 1
    return -(-num_sequences // num_replicas) * num_replicas


def recipe_name(text: str) -> str:
    """The name of a recipe that there is."""
    try:
        return recipe_named(text).name
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def parse_speculative(text: str) -> str:
    """The name of what drafts."""
    try:
        read_speculative(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def parse_mesh_option(text: str) -> str:
    """The name of a mesh, or auto; whether the model and the machine allow it is seen later."""
    from jaxserve.engine.mesh import AUTO
    from sharding import parse_mesh

    try:
        if text != AUTO:
            parse_mesh(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def parse_size(text: str) -> int:
    """Bytes: `512M` is 512 * 2**20; K, M, G and T are powers of 1024."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: expected bytes, or a number as in 512M or 2G")
    return int(float(match[1]) * 1024 ** _UNITS[match[2].upper()])
