"""What is asked of a server: a recorded trace, or prompts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.planning.advice.repeats import Grain, Repeats, Units, find_repeats, split_words
from jaxserve.planning.traces import BLOCK_TOKENS, Trace
from jaxserve.text_lines import text_lines

MOST_PROMPT_UNITS = 1_000_000
"""Words or token ids of prompts that are compared: a second's work, and enough to tell."""
_BLOCKS = Grain(block=1, shingle=1, sampling=1, unit_tokens=BLOCK_TOKENS)
"""For the hashes of a trace."""


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Tokens of requests."""

    mean: float
    p50: float
    p95: float

    @classmethod
    def of(cls, tokens: Sequence[int]) -> Lengths:
        p50, p95 = np.percentile(tokens, (50, 95)).tolist()
        return cls(mean=float(np.mean(tokens)), p50=p50, p95=p95)


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Requests as they were recorded."""

    name: str
    num_requests: int
    repeats: Repeats | None
    """None where the record does not say what requests have in common."""
    longest: int | None = None
    """Tokens of the longest prompt with its answer; None where lengths are not known, as are the rest."""
    answers: Lengths | None = None
    together_share: float | None = None
    """Requests that come within a second of the one before them, as a share of all."""


def trace_traffic(trace: Trace) -> Traffic:
    """What a trace says."""
    requests = trace.requests
    gaps = np.diff([request.arrival for request in requests])
    return Traffic(
        name=trace.name,
        num_requests=len(requests),
        repeats=_trace_repeats(trace) if any(one.prefix_hashes for one in requests) else None,
        longest=max(one.prompt_tokens + one.output_tokens for one in requests),
        answers=Lengths.of([one.output_tokens for one in requests]),
        together_share=float(np.count_nonzero(gaps <= 1.0) / len(requests)),
    )


def _trace_repeats(trace: Trace) -> Repeats:
    """By block hashes, each of which stands for what is in its block."""
    repeats = find_repeats([request.prefix_hashes for request in trace.requests], _BLOCKS)
    return replace(repeats, prefix_share=trace.ideal_reuse)


def prompt_traffic(name: str, prompts: Sequence[str | list[int]]) -> Traffic:
    """What prompts, texts or token ids, have in common; the first million words of them are compared."""
    units: list[Units] = []
    num_units = 0
    for prompt in prompts:
        units.append(split_words(prompt) if isinstance(prompt, str) else prompt)
        num_units += len(units[-1])
        if num_units >= MOST_PROMPT_UNITS:
            break
    return Traffic(name=name, num_requests=len(prompts), repeats=find_repeats(units))


def read_prompts(path: Path) -> list[str | list[int]]:
    """Prompts of a JSONL file, gzipped or not: each line has a text or token ids under `prompt`, a text under
    `question`, conversations under `messages` or `turns`, or a whole request of a batch under `body`.

    Raises ValueError, naming file and line, for a line without any, or a file without lines.
    """
    prompts: list[str | list[int]] = []
    for number, text in enumerate(text_lines(path), start=1):
        if text.strip():
            try:
                prompts.append(_prompt(json.loads(text)))
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
    if not prompts:
        raise ValueError(f"{path} holds no prompt")
    return prompts


def _prompt(line: Any) -> str | list[int]:
    if isinstance(line, Mapping):
        body = line.get("body")
        found = line if body is None else body
        if isinstance(found, Mapping):
            if "messages" in found:
                return _conversation(found["messages"])
            turns = found.get("turns")
            asked = found.get("prompt", found.get("question"))
            value = turns[0] if isinstance(turns, list) and turns else asked
            if isinstance(value, str) and value:
                return value
            if isinstance(value, list) and value and all(type(item) is int for item in value):
                return value
    raise ValueError("no prompt: expected a text or token ids under prompt, question or turns, or messages")


def _conversation(messages: Any) -> str:
    """A conversation as a text in which equal beginnings of it are equal."""
    if not (isinstance(messages, list) and messages and all(isinstance(one, Mapping) for one in messages)):
        raise ValueError(f"messages is {messages!r}; expected a list of objects with role and content")
    return "\n".join(_turn(message) for message in messages)


def _turn(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    parts: Iterable[Any] = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    return f"[{message.get('role')}]" + "".join(text for text in texts if isinstance(text, str))
