"""How a model's makers would sample from it: `generation_config.json` beside its weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxserve.plan import SamplingParams
from jaxserve.weights.settings import Settings

GENERATION_CONFIG = "generation_config.json"
_KEYS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_tokens": "max_new_tokens",
}
"""The library's name of a parameter, and the file's; vLLM reads the same ones."""

SAMPLING_DEFAULTS = frozenset(_KEYS)
"""Parameters for which a model may have a default of its own."""


def read_sampling_defaults(folder: Path) -> Mapping[str, Any]:
    """Sampling parameters that a model folder recommends, by the library's names; none without the file.

    Raises ValueError, naming the file, for a value of the wrong type or out of range.
    """
    path = folder / GENERATION_CONFIG
    if not path.is_file():
        return {}
    settings = Settings.from_json(path)
    values = {name: settings.get(key) for name, key in _KEYS.items()}
    found = {name: value for name, value in values.items() if value is not None}
    try:
        SamplingParams(**found)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return found
