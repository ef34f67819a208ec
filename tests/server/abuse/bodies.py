"""Things to say to a server that are wrong in many ways, each a fixed function of a source of noise."""

from __future__ import annotations

import json
import random
from typing import Any

PATHS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")
LARGEST_BODY = 8 * 2**20
"""That the HTTP door takes."""

_MESSAGE = {"role": "user", "content": "hi"}
_VALID: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 5,
        "stream": True,
    },
    "/v1/completions": {"prompt": "hello", "max_tokens": 5, "n": 2, "logprobs": 2, "stop": ["x"]},
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [5, 6, 7]},
}
_ODD_VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 2**31, 2**63, 10**400, -0.0, 1e308, "", "\x00", "x" * 5000, "\ud800", "🙂"),
    *([], [[]], [None], [10**9], {}, {"": {}}, {"type": "json_schema"}, {"a": {"b": {"c": []}}}),
)
_FIELDS = (
    *("messages", "prompt", "tokens", "max_tokens", "n", "logprobs", "top_logprobs", "stop", "stream"),
    *("temperature", "top_p", "top_k", "seed", "logit_bias", "tools", "tool_choice", "response_format"),
    *("guided_regex", "guided_grammar", "guided_choice", "structured_outputs", "stream_options", "model"),
    *("echo", "prompt_logprobs", "allowed_token_ids", "bad_token_ids", "min_tokens", "no_such_field"),
)
_BAD_GRAMMARS: tuple[dict[str, Any], ...] = (
    {"guided_regex": "(((("},
    {"guided_regex": "[z-a]{99999999}"},
    {"guided_grammar": "root ::= root root"},
    {"guided_grammar": 'root ::= "a" |'},
    {"guided_choice": []},
    {"guided_json": {"type": "no such type"}},
    {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {"$ref": "#/nowhere"}},
        }
    },
    {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {"$ref": "http://x"}},
        }
    },
)
_HEAVY_GRAMMAR = {"guided_json": {"type": "number", "multipleOf": 1000003}}
"""Takes seconds to compile, and is to be given up sooner."""


def hostile_body(noise: random.Random, path: str) -> bytes:
    """A body that was valid, or nearly, before something happened to it."""
    kind = noise.random()
    if kind < 0.35:
        return spoilt(noise, encoded(_VALID[path]))
    if kind < 0.75:
        body = dict(_VALID[path])
        for _ in range(noise.randrange(1, 4)):
            body[noise.choice(_FIELDS)] = noise.choice(_ODD_VALUES)
        return encoded(body)
    if kind < 0.85:
        return encoded(_VALID[path] | noise.choice(_BAD_GRAMMARS))
    if kind < 0.855:
        return encoded(_VALID[path] | _HEAVY_GRAMMAR)
    if kind < 0.95:
        depth = noise.choice((10, 33, 1000, 100_000))
        return noise.choice((b"[" * depth, b'{"a":' * depth, b"[" * depth + b"]" * depth))
    return noise.randbytes(noise.randrange(300))


def encoded(body: Any) -> bytes:
    """JSON, with lone surrogates as JSON can spell them."""
    return json.dumps(body).encode()


def spoilt(noise: random.Random, data: bytes) -> bytes:
    """The same with a few bytes changed, cut off or added."""
    spoiled = bytearray(data)
    for _ in range(noise.randrange(4)):
        spoiled[noise.randrange(len(spoiled))] = noise.randrange(256)
    if noise.random() < 0.3:
        del spoiled[noise.randrange(len(spoiled)) :]
    if noise.random() < 0.2:
        spoiled += noise.randbytes(20)
    return bytes(spoiled)
