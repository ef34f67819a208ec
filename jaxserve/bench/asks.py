"""What one client asks for, fixed beforehand: a pure function of the configuration's seed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request."""

    token_ids: Sequence[int]
    max_tokens: int
    """The answer's length: no end of the model's own is heard, but that of a grammar."""
    arrival: float = 0.0
    """Seconds from the start of its run."""
    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """OpenAI's parameters, with a seed."""
    group: str = ""
    """Under which its figures are told apart from those of others in the run."""
    tenant: str = ""
    priority: str = ""
    """A priority class of the server; "" is the usual one."""
    attempts: int = 1
    """How often it is sent at most, where the server refuses it for now."""
    leave_after: int | None = None
    """Pieces of the answer after which the client cancels."""
    shares: bool = True
    """Whether others may find its prompt in the server's cache, and it theirs."""
    regex: str | None = None
    """What the answer must match."""

    def body(self, model: str, namespace: str) -> dict[str, Any]:
        """The request of `/v1/completions`. `namespace`: of those that share prefixes."""
        body: dict[str, Any] = {
            "model": model,
            "prompt": list(self.token_ids),
            "max_tokens": self.max_tokens,
            "ignore_eos": self.regex is None,
            "stream": True,
            "stream_options": {"include_usage": True},
            "cache_salt": namespace if self.shares else f"{namespace}-{self.sampling['seed']}",
            **self.sampling,
        }
        if self.priority:
            body["priority"] = self.priority
        if self.regex is not None:
            body["structured_outputs"] = {"regex": self.regex}
        return body

    @property
    def greedy(self) -> bool:
        return self.sampling.get("temperature") == 0.0


class Draw:
    """The dice of one cell in one repeat: the same for the same seed, whatever else is planned."""

    def __init__(self, seed: int, cell: str, repeat: int, vocab_size: int) -> None:
        """`vocab_size`: token ids are below it."""
        place = int.from_bytes(hashlib.sha256(cell.encode()).digest()[:8])
        self.rng = np.random.default_rng([seed, repeat, place])
        self._vocab_size = vocab_size

    def tokens(self, count: int) -> list[int]:
        """Random token ids."""
        return self.rng.integers(0, self._vocab_size, count).tolist()

    def whole(self) -> int:
        """A seed for something else."""
        return int(self.rng.integers(0, 2**31))

    def chosen(self, count: int, share: float) -> frozenset[int]:
        """Which of so many make up this share, rounded."""
        picked = self.rng.choice(count, round(share * count), replace=False)
        return frozenset(picked.tolist())


def digest_of(value: Any) -> str:
    """A name for a JSON value: 16 hexadecimal digits of its SHA-256."""
    return hashlib.sha256(_json(value)).hexdigest()[:16]


def plan_digest(asks: Iterable[Ask]) -> str:
    """A name for a sequence of requests, the `digest_of` their list, of which one at a time is held."""
    digest = hashlib.sha256(b"[")
    for place, ask in enumerate(asks):
        digest.update(b"," * (place > 0) + _json(asdict(ask)))
    digest.update(b"]")
    return digest.hexdigest()[:16]


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
