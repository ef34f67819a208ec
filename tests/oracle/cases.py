"""Stored answers of transformers: what tests load. numpy only; `regenerate` writes the files."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]

ORACLE_DATA = Path(__file__).resolve().parent.parent / "data" / "oracle"

NUM_GREEDY = 64
"""Tokens of each stored greedy answer, end-of-sequence ids not heeded."""


@dataclass(frozen=True, kw_only=True)
class OracleCase:
    """One prompt to a tiny model: P prompt tokens, N positions with stored logits, V vocabulary."""

    prompt_ids: IntArray
    """[P]"""
    positions: IntArray
    """[N] ascending indices into the prompt; the last one is always P - 1."""
    logits: FloatArray
    """[N, V] logits after the tokens at these positions."""
    nll: FloatArray
    """[P - 1] negative log-likelihood of the prompt's tokens from the second on, natural."""
    greedy_ids: IntArray
    """[NUM_GREEDY] the most likely continuation, end-of-sequence ids included."""
    greedy_logprobs: FloatArray
    """[NUM_GREEDY] log-probability of each of these tokens."""
    margins: FloatArray
    """[NUM_GREEDY] logit of each of these tokens less that of the runner-up."""


@dataclass(frozen=True)
class OracleCases:
    """The stored cases of one tiny model, shortest prompt first."""

    name: str
    weights_sha256: str
    """`weights_digest` of the model that gave these answers."""
    cases: tuple[OracleCase, ...]


@dataclass(frozen=True, kw_only=True)
class TextCase:
    """One prompt to SmolLM2, as text or as chat messages; the other of the two is None."""

    label: str
    text: str | None
    messages: tuple[dict[str, str], ...] | None
    prompt_ids: IntArray
    """[P] the text's tokens as they are, or the messages' through the chat template."""
    greedy_ids: IntArray
    """[NUM_GREEDY] end-of-sequence ids not heeded."""
    margins: FloatArray
    """[NUM_GREEDY] top-2 logit gaps; rounding may choose otherwise after one under 1e-3."""
    first_step_top5: tuple[tuple[int, float], ...]
    """The five most likely first tokens and their logits."""

    def num_exact(self, margin: float = 1e-3) -> int:
        """How many of the greedy tokens come before the first gap below `margin`."""
        below = np.flatnonzero(self.margins < margin)
        return int(below[0]) if below.size else len(self.margins)


@dataclass(frozen=True, kw_only=True)
class SmolLM2Cases:
    """The stored answers of SmolLM2-135M-Instruct, loaded from its Q4_1 GGUF into float32."""

    gguf_sha256: str
    cases: tuple[TextCase, ...]
    nll_text: str
    """The tokens of `nll_ids`, decoded; encoding it gives them again."""
    nll_ids: IntArray
    """[256]"""
    nll: FloatArray
    """[255] negative log-likelihood of `nll_ids` from the second on, natural."""


def load_cases(name: str, folder: Path = ORACLE_DATA) -> OracleCases:
    """The stored cases of the tiny model `name`.

    Raises ValueError, naming the file, if nothing is stored for it.
    """
    path = folder / f"{name}.npz"
    if not path.is_file():
        raise ValueError(
            f"no answers are stored in {path}; write them with python -m tests.oracle.regenerate"
        )
    with np.load(path, allow_pickle=False) as file:
        stored = dict(file)
    digest = str(stored.pop("weights_sha256"))
    count = 1 + max(int(key.split(".")[0]) for key in stored)
    cases = tuple(
        OracleCase(**{field.name: stored[f"{index}.{field.name}"] for field in fields(OracleCase)})
        for index in range(count)
    )
    return OracleCases(name, digest, cases)


def save_cases(cases: OracleCases, folder: Path = ORACLE_DATA) -> Path:
    """Write what `load_cases` reads; the same cases give the same bytes."""
    arrays: dict[str, Any] = {"weights_sha256": np.asarray(cases.weights_sha256)}
    for index, case in enumerate(cases.cases):
        for field in fields(case):
            arrays[f"{index}.{field.name}"] = getattr(case, field.name)
    path = folder / f"{cases.name}.npz"
    np.savez_compressed(path, allow_pickle=False, **arrays)
    return path


def load_smollm2(folder: Path = ORACLE_DATA) -> SmolLM2Cases:
    """The stored cases of SmolLM2-135M-Instruct."""
    stored = json.loads((folder / "smollm2.json").read_text(encoding="utf-8"))
    cases = tuple(
        TextCase(
            label=case["label"],
            text=case["text"],
            messages=None if case["messages"] is None else tuple(case["messages"]),
            prompt_ids=np.asarray(case["prompt_ids"], np.int32),
            greedy_ids=np.asarray(case["greedy_ids"], np.int32),
            margins=np.asarray(case["margins"], np.float32),
            first_step_top5=tuple((token_id, logit) for token_id, logit in case["first_step_top5"]),
        )
        for case in stored["cases"]
    )
    return SmolLM2Cases(
        gguf_sha256=stored["gguf_sha256"],
        cases=cases,
        nll_text=stored["nll_text"],
        nll_ids=np.asarray(stored["nll_ids"], np.int32),
        nll=np.asarray(stored["nll"], np.float32),
    )


def save_smollm2(cases: SmolLM2Cases, folder: Path = ORACLE_DATA) -> Path:
    """Write what `load_smollm2` reads: one line a case, floats to five decimals."""
    content: dict[str, Any] = {
        "gguf_sha256": json.dumps(cases.gguf_sha256),
        "cases": "[\n" + ",\n".join(_text_case_json(case) for case in cases.cases) + "\n]",
        "nll_text": json.dumps(cases.nll_text, ensure_ascii=False),
        "nll_ids": json.dumps(cases.nll_ids.tolist()),
        "nll": json.dumps(_rounded(cases.nll)),
    }
    path = folder / "smollm2.json"
    lines = ",\n".join(f'"{key}": {text}' for key, text in content.items())
    path.write_text("{\n" + lines + "\n}\n", encoding="utf-8")
    return path


def _text_case_json(case: TextCase) -> str:
    content = {
        "label": case.label,
        "text": case.text,
        "messages": case.messages,
        "prompt_ids": case.prompt_ids.tolist(),
        "greedy_ids": case.greedy_ids.tolist(),
        "margins": _rounded(case.margins),
        "first_step_top5": [[token_id, round(logit, 5)] for token_id, logit in case.first_step_top5],
    }
    return json.dumps(content, ensure_ascii=False)


def _rounded(values: FloatArray) -> list[float]:
    return [round(float(value), 5) for value in values]
