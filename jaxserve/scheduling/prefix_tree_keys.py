"""Names of cached pages: a typed root for everything that makes keys and values differ, then the tokens.

A page's key is a digest of its parent's key and its own token ids, so it stands for the whole text up to
the page's end, computed by one model in one format for one audience. Fields are length-prefixed and named:
no two kinds of salt can be mistaken for each other. The tree compares tokens themselves; keys are for those
who cannot: lower tiers of storage and routers.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from jaxserve.scheduling.terms import ServiceTerms

KEY_BYTES = 16
TOKEN_BYTES = 4
"""A token id is stored as a little-endian 32-bit integer."""

TokenIds = Sequence[int] | npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class CacheScope:
    """Who may share pages: a tenant alone, all who name the same namespace, or one submission's samples."""

    kind: Literal["tenant", "namespace", "submission"]
    name: str

    @classmethod
    def of(cls, terms: ServiceTerms) -> CacheScope:
        """The scope that a request asks for; a namespace never equals a tenant of the same name."""
        if terms.namespace is None:
            return cls("tenant", terms.tenant)
        return cls("namespace", terms.namespace)


@dataclass(frozen=True, slots=True)
class CacheDomain:
    """The root of a family of pages: everything beside the tokens on which keys and values depend."""

    model: str
    """A fingerprint of the weights and of what computes with them."""
    kv_format: str
    scope: CacheScope
    adapter: str | None = None
    adapter_version: str | None = None

    def key(self, page_size: int) -> bytes:
        """A digest of every field and of the page size, under which the keys of the pages chain."""
        digest = blake2b(digest_size=KEY_BYTES, person=b"jaxserve.domain")
        fields = {
            "model": self.model,
            "kv_format": self.kv_format,
            "scope_kind": self.scope.kind,
            "scope_name": self.scope.name,
            "adapter": self.adapter,
            "adapter_version": self.adapter_version,
            "page_size": str(page_size),
        }
        for name, value in fields.items():
            if value is not None:
                for part in (name, value):
                    text = part.encode("utf-8", "surrogatepass")
                    digest.update(len(text).to_bytes(8, "little") + text)
        return digest.digest()


def page_key(parent: bytes, label: bytes) -> bytes:
    """The key of the page of tokens `label` (`encode_tokens`) below the page or domain with key `parent`."""
    return blake2b(parent + label, digest_size=KEY_BYTES).digest()


def event_hash(key: bytes) -> int:
    """A key as the signed 64-bit integer by which routers know the page."""
    return int.from_bytes(key[:8], "little", signed=True)


def encode_tokens(tokens: TokenIds) -> bytes:
    """Token ids as little-endian int32 bytes. Raises OverflowError for an id outside int32."""
    if isinstance(tokens, np.ndarray):
        return tokens.astype("<i4", copy=False).tobytes()
    return array("i", tokens).tobytes() if _ARRAY_IS_INT32 else np.asarray(tokens, "<i4").tobytes()


def decode_tokens(text: bytes) -> list[int]:
    """The token ids in the bytes of `encode_tokens`."""
    return np.frombuffer(text, "<i4").tolist()


def common_tokens(text: bytes, other: bytes) -> int:
    """How many leading tokens two encoded texts share."""
    size = min(len(text), len(other))
    differing = int.from_bytes(text[:size], "big") ^ int.from_bytes(other[:size], "big")
    return (size - (differing.bit_length() + 7) // 8) // TOKEN_BYTES


_ARRAY_IS_INT32 = array("i", [1]).tobytes() == b"\1\0\0\0"
