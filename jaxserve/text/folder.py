"""Reads what a Hugging Face model folder says about its tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from jaxserve.text.gguf_vocabulary import SPECIAL_TOKEN_KEYS, set_sequence_marks


@dataclass(frozen=True)
class FolderTokenizer:
    """A folder's `tokenizer.json`, and what the smaller files beside it add.

    special_tokens: text of each named special token, such as `bos_token`. eos_token_ids: the
    tokenizer's own end-of-sequence id first, then those of generation_config.json. chat_templates:
    Jinja sources by name, the usual one under `default`.
    """

    backend: tokenizers.Tokenizer
    special_tokens: dict[str, str]
    eos_token_ids: tuple[int, ...]
    chat_templates: dict[str, str]


def read_folder(path: Path) -> FolderTokenizer:
    """Raises ValueError, naming the file, if `tokenizer.json` is missing or any file is malformed."""
    backend = _read_backend(path / "tokenizer.json")
    config = _read_json(path / "tokenizer_config.json")
    special_tokens = _special_tokens(_read_json(path / "special_tokens_map.json") | config)
    marks = {
        name: _known(backend, path, name, special_tokens.get(name)) for name in ("bos_token", "eos_token")
    }
    if "add_bos_token" in config or "add_eos_token" in config:
        # As in transformers: once the config states either, the post-processor of tokenizer.json is void.
        before, after = (marks[name] if config.get(f"add_{name}") else None for name in marks)
        set_sequence_marks(backend, before, after)
    own_end = [marks["eos_token"][1]] if marks["eos_token"] else []
    ends = dict.fromkeys([*own_end, *_generation_ends(path / "generation_config.json")])
    return FolderTokenizer(backend, special_tokens, tuple(ends), _chat_templates(path, config))


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise ValueError(f"{path.parent} has no tokenizer.json, the only tokenizer format read from a folder")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{path} is not a readable tokenizer: {error}") from error
    # Some folders keep the settings of their training run.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _read_json(path: Path) -> dict[str, Any]:
    """The file's object, empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}; expected an object")
    return value


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in SPECIAL_TOKEN_KEYS:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found


def _known(backend: tokenizers.Tokenizer, path: Path, name: str, text: str | None) -> tuple[str, int] | None:
    if text is None:
        return None
    token_id = backend.token_to_id(text)
    if token_id is None:
        raise ValueError(f"{path} names {text!r} as its {name}, which its tokenizer.json does not have")
    return text, token_id


def _generation_ends(path: Path) -> list[int]:
    stated = _read_json(path).get("eos_token_id")
    ends = stated if isinstance(stated, list) else [] if stated is None else [stated]
    if not all(isinstance(token_id, int) for token_id in ends):
        raise ValueError(f"{path} has eos_token_id {stated!r}; expected a token id or a list of them")
    return ends


def _chat_templates(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The newer places win: .jinja files over chat_template.json over tokenizer_config.json."""
    templates: dict[str, str] = {}
    for source in (config, _read_json(path / "chat_template.json")):
        match source.get("chat_template"):
            case None:
                continue
            case str(template):
                templates["default"] = template
            case [*entries] if all(_is_named_template(entry) for entry in entries):
                templates |= {entry["name"]: entry["template"] for entry in entries}
            case other:
                raise ValueError(f"{path} has the chat_template {other!r}; expected a text or named texts")
    for file in sorted((path / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = file.read_text(encoding="utf-8")
    if (file := path / "chat_template.jinja").is_file():
        templates["default"] = file.read_text(encoding="utf-8")
    return templates


def _is_named_template(entry: Any) -> bool:
    match entry:
        case {"name": str(), "template": str()}:
            return True
    return False
