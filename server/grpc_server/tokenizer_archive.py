"""A tokenizer as a zip archive, from which a gateway builds its own."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path

from smg_grpc_proto.generated import common_pb2

from jaxserve.text import Tokenizer

_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
_CHUNK_BYTES = 2**20


def archive(tokenizer: Tokenizer, model_path: Path) -> bytes:
    """A zip of the model folder's own files, or of what a GGUF file's tokenizer amounts to in such files."""
    files = {name: (model_path / name).read_bytes() for name in _FILES if (model_path / name).is_file()}
    if "tokenizer.json" not in files:
        files = _written_out(tokenizer)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as target:
        for name, data in files.items():
            target.writestr(
                zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED
            )  # No date: the same bytes always.
    return buffer.getvalue()


def chunks(data: bytes) -> Iterator[common_pb2.GetTokenizerChunk]:
    """An archive in messages, the last of which has its digest."""
    starts = range(0, len(data), _CHUNK_BYTES)
    for start in starts:
        last = start == starts[-1]
        yield common_pb2.GetTokenizerChunk(
            data=data[start : start + _CHUNK_BYTES], sha256=hashlib.sha256(data).hexdigest() if last else ""
        )


def _written_out(tokenizer: Tokenizer) -> dict[str, bytes]:
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.special_tokens}
    if "default" in tokenizer.chat_templates:
        config["chat_template"] = tokenizer.chat_templates["default"]
    return {
        "tokenizer.json": tokenizer.backend.to_str().encode(),
        "tokenizer_config.json": json.dumps(config, sort_keys=True).encode(),
    }
