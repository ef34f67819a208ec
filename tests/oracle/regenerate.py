"""Write the stored answers anew, or check that transformers still gives them.

    python -m tests.oracle.regenerate [--check] [names...]

Needs the oracle extra (torch, transformers). Without names it does every tiny model and SmolLM2.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.weights import pull
from tests.oracle.cases import (
    ORACLE_DATA,
    IntArray,
    OracleCases,
    SmolLM2Cases,
    load_cases,
    load_smollm2,
    save_cases,
    save_smollm2,
)
from tests.oracle.reference import load_reference, one_thread, tiny_case
from tests.oracle.smollm2 import smollm2_cases
from tests.oracle.tiny_models import TINY_MODELS, TinyModel, weights_digest, write_tiny_model

SMOLLM2 = "smollm2"
TINY_TOLERANCE = 1e-5
SMOLLM2_TOLERANCE = 1e-3
"""Thirty layers on another machine's float32; and what is stored is rounded to five decimals."""

PROMPT_POSITIONS: dict[int, tuple[int, ...]] = {
    1: (0,),
    5: (0, 1, 2, 3, 4),
    40: (0, 7, 15, 16, 17, 31, 39),
    70: (0, 16, 33, 47, 64, 69),
}
"""Prompt lengths, on both sides of the windows and of common pages, and where logits are stored."""


def prompts(model: TinyModel) -> list[IntArray]:
    """The prompts of a tiny model: uniform token ids, from the stable raw stream of its seed."""
    stream = np.random.PCG64(np.random.SeedSequence([model.seed, len(model.name)]))
    vocab_size = model.config["vocab_size"]
    return [
        (np.asarray(stream.random_raw(length)) % np.uint64(vocab_size)).astype(np.int32)
        for length in PROMPT_POSITIONS
    ]


def tiny_cases(name: str) -> OracleCases:
    """Ask transformers everything about the tiny model `name`."""
    model = TINY_MODELS[name]
    with tempfile.TemporaryDirectory() as folder, one_thread():
        reference = load_reference(write_tiny_model(name, Path(folder)))
        cases = tuple(
            tiny_case(reference, prompt_ids, np.asarray(PROMPT_POSITIONS[len(prompt_ids)], np.int32))
            for prompt_ids in prompts(model)
        )
    return OracleCases(name, weights_digest(name), cases)


def differences(stored: Any, fresh: Any, tolerance: float, path: str = "") -> Iterator[str]:
    """Say where two records of cases differ: floats by more than `tolerance`, anything else at all."""
    if is_dataclass(stored):
        for field in fields(stored):
            name = f"{path}.{field.name}".lstrip(".")
            yield from differences(getattr(stored, field.name), getattr(fresh, field.name), tolerance, name)
    elif isinstance(stored, tuple) and len(stored) == len(fresh):
        for index, pair in enumerate(zip(stored, fresh, strict=True)):
            yield from differences(*pair, tolerance, f"{path}[{index}]")
    elif isinstance(stored, np.ndarray | float):
        left, right = np.asarray(stored), np.asarray(fresh)
        exact = not np.issubdtype(left.dtype, np.floating)
        if left.shape != right.shape:
            yield f"{path}: stored shape {left.shape}, now {right.shape}"
        elif exact and not np.array_equal(left, right):
            yield f"{path}: stored {left.tolist()}, now {right.tolist()}"
        elif not exact and not np.allclose(left, right, rtol=tolerance, atol=tolerance):
            yield f"{path}: differs by up to {np.abs(left - right).max():.3g}"
    elif stored != fresh:
        yield f"{path}: stored {stored!r}, now {fresh!r}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns 1 if a check found a difference, else 0."""
    parser = _parser()
    options = parser.parse_args(arguments)
    known = [*TINY_MODELS, SMOLLM2]
    if unknown := [name for name in options.names if name not in known]:
        parser.error(f"no model is called {', '.join(unknown)}; there are {', '.join(known)}")
    failed = False
    for name in options.names or known:
        found = list(_process(name, options))
        failed |= bool(found)
        print(f"{name}: {'differs' if found else 'agrees' if options.check else 'written'}")
        for difference in found:
            print(f"  {difference}")
    return int(failed)


def _process(name: str, options: argparse.Namespace) -> Iterator[str]:
    """Check or write one model's answers; yields the differences that a check finds."""
    fresh: OracleCases | SmolLM2Cases
    if name == SMOLLM2:
        gguf = _smollm2_path(options.smollm2)
        with one_thread():
            fresh = smollm2_cases(gguf)
        if options.check:
            yield from differences(load_smollm2(options.data), fresh, SMOLLM2_TOLERANCE)
        else:
            save_smollm2(fresh, options.data)
    else:
        fresh = tiny_cases(name)
        if options.check:
            yield from differences(load_cases(name, options.data), fresh, TINY_TOLERANCE)
        else:
            save_cases(fresh, options.data)


def _smollm2_path(given: Path | None) -> Path:
    """The given GGUF, or the one that `jaxserve pull` keeps, pulled if it is not there yet."""
    return pull("smollm2-135m") if given is None else given


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.oracle.regenerate", description="Write or check the stored answers."
    )
    parser.add_argument("names", nargs="*", help="tiny models, or smollm2; default: all")
    parser.add_argument("--check", action="store_true", help="compare with what is stored; write nothing")
    parser.add_argument("--smollm2", type=Path, metavar="GGUF", help="SmolLM2-135M-Instruct, Q4_1")
    parser.add_argument("--data", type=Path, default=ORACLE_DATA, metavar="FOLDER", help="stored answers")
    return parser


if __name__ == "__main__":
    sys.exit(main())
