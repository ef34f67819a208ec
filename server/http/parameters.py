"""The parameters that chat and completions share: OpenAI's names, vLLM's beside them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from jaxserve.plan import SamplingParams
from server.http.errors import bad_request, param_in
from server.http.fields import Fields, Neutral, is_one_of
from server.http.grammars import read_grammar

MAX_STOP_STRINGS = 64
UNLIMITED = 2**31 - 1
"""As max_tokens: more than any context holds."""

_INTEGERS = ("n", "top_k", "min_tokens", "seed")
_NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
_TOKEN_IDS = ("stop_token_ids", "allowed_token_ids", "bad_token_ids")
_FLAGS = {"ignore_eos": False, "include_stop_str_in_output": False, "skip_special_tokens": True}


def _is_text(value: object) -> bool:
    return isinstance(value, str)


NEUTRAL: Neutral = {
    "user": _is_text,
    "safety_identifier": _is_text,
    "prompt_cache_key": _is_text,
    "metadata": lambda value: isinstance(value, dict),
    "service_tier": is_one_of("auto", "default"),
    "store": is_one_of(False),
    "best_of": is_one_of(1),
    "use_beam_search": is_one_of(False),
    "length_penalty": is_one_of(1, 1.0),
    "bad_words": is_one_of([]),
    "spaces_between_special_tokens": is_one_of(True),
}
"""Parameters that both endpoints know and cannot do anything about, with the values that ask for nothing."""


@dataclass(frozen=True)
class StreamOptions:
    """Whether and how an answer is streamed."""

    stream: bool = False
    include_usage: bool = False
    """A last chunk with the usage."""


def read_stream_options(fields: Fields) -> StreamOptions:
    """Take `stream` and `stream_options`. Raises ApiError (400) for options without a stream."""
    stream = fields.flag("stream")
    options = fields.mapping("stream_options")
    if options is None:
        return StreamOptions(stream)
    if not stream:
        raise bad_request("stream_options needs stream to be true", "stream_options")
    inner = Fields(options, inside="stream_options")
    chosen = StreamOptions(stream, inner.flag("include_usage"))
    inner.finish({"include_obfuscation": is_one_of(False), "continuous_usage_stats": is_one_of(False)})
    return chosen


def read_sampling(
    fields: Fields, *, max_tokens: int, logprobs: int | None, prompt_logprobs: int | None
) -> SamplingParams:
    """Take every sampling parameter; the arguments are those that the endpoints name differently.

    Raises ApiError (400) naming the parameter for a value of the wrong type or out of range.
    """
    given: dict[str, Any] = {name: fields.integer(name) for name in _INTEGERS}
    given |= {name: fields.number(name) for name in _NUMBERS}
    given |= {name: fields.token_ids(name) for name in _TOKEN_IDS}
    given |= {name: fields.flag(name, default) for name, default in _FLAGS.items()}
    given |= {
        "logit_bias": _read_logit_bias(fields),
        "stop": fields.texts("stop", MAX_STOP_STRINGS),
        "max_tokens": max_tokens,
        "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
        "grammar": read_grammar(fields),
    }
    try:
        return SamplingParams(**{name: value for name, value in given.items() if value is not None})
    except ValueError as error:
        raise bad_request(str(error), param_in(str(error))) from None


def _read_logit_bias(fields: Fields) -> dict[int, float] | None:
    given = fields.mapping("logit_bias")
    if given is None:
        return None
    biases: dict[int, float] = {}
    for key, value in given.items():
        if not re.fullmatch(r"[0-9]{1,10}", key):
            raise fields.wrong("logit_bias", key, "token ids as keys")
        biases[int(key)] = fields.as_number("logit_bias", value)
    return biases
