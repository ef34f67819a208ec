"""From a token to its bytes: the part of a `tokenizers` decoder that looks at one token at a time."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SUPPORTED = "ByteLevel, Metaspace, or a Sequence of Replace, ByteFallback, Fuse, Strip and these"


def _byte_level_alphabet() -> dict[str, int]:
    """The printable stand-in that byte-level BPE (GPT-2) uses for each byte, mapped to the byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), 256)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if chr(byte) not in alphabet]
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_level_alphabet()


@dataclass(frozen=True, kw_only=True)
class PieceCodec:
    """How a tokenizer's tokens spell text.

    Every decoder of the supported families is a map from a token to bytes, a concatenation, and at most
    some spaces taken off the very start. Reading it that way, rather than calling it, is what makes
    streaming exact: bytes that have been said never change, whereas the ByteFallback decoder of
    `tokenizers` turns a whole run of byte tokens into replacement characters when a later one is invalid.
    """

    byte_level: bool = False
    """Tokens are written in the byte-level alphabet."""
    byte_fallback: bool = False
    """A token `<0xNN>` is that byte."""
    replacements: tuple[tuple[str, str], ...] = ()
    """Substitutions within a token, in order."""
    strip_start: int = 0
    """Spaces, at most, that do not belong to the text when they open it."""

    def encode(self, token: str, *, added: bool) -> bytes:
        """The bytes that a token stands for; `added` tokens lie outside the byte-level alphabet."""
        if self.byte_level:
            if not added:
                try:
                    return bytes(map(_BYTE_OF_CHARACTER.__getitem__, token))
                except KeyError:
                    pass  # not written in the alphabet: a literal text, as an added token is
            return token.encode()
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        for old, new in self.replacements:
            token = token.replace(old, new)
        return token.encode()


def read_codec(decoder: Any) -> PieceCodec:
    """The codec of a `tokenizers` decoder object.

    Raises ValueError, naming it, for a decoder whose output is not the tokens' bytes in a row.
    """
    if decoder is None:
        raise ValueError(f"the tokenizer has no decoder; supported are {_SUPPORTED}")
    codec, fused = PieceCodec(), False
    for step in _steps(json.loads(decoder.__getstate__())):
        codec = replace(codec, **_changes(codec, step, fused))
        fused = fused or step["type"] == "Fuse"
    return codec


def _steps(spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if spec["type"] != "Sequence":
        yield spec
        return
    for inner in spec["decoders"]:
        yield from _steps(inner)


def _changes(codec: PieceCodec, step: dict[str, Any], fused: bool) -> dict[str, Any]:
    """What one decoder changes in a codec; `fused` says that it sees the text rather than its tokens."""
    changes: dict[str, Any] = {}
    match step:
        case {"type": "ByteLevel"}:
            changes["byte_level"] = True
        case {"type": "Metaspace", "replacement": str(mark), "prepend_scheme": str(scheme)}:
            changes["replacements"] = (*codec.replacements, (mark, " "))
            changes["strip_start"] = 0 if scheme == "never" else 1
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
            changes["replacements"] = (*codec.replacements, (old, new))
        case {"type": "ByteFallback"}:
            changes["byte_fallback"] = True
        case {"type": "Fuse"}:
            pass
        case {"type": "Strip", "content": " ", "start": int(start), "stop": 0} if fused:
            changes["strip_start"] = start
        case _:
            raise ValueError(f"unsupported tokenizer decoder {json.dumps(step)}; supported are {_SUPPORTED}")
    return changes
