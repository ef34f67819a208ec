"""What the clients of a benchmark ask for, and when: a fixed function of its seed."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.bench.traffic import arrival_times
from jaxserve.planning import PromptMaker, TraceRequest, read_trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One request."""

    content: str | list[int]
    """A text, or token ids."""
    max_tokens: int
    """Longest answer, and its length where it does not end by itself."""
    arrival: float = 0.0
    """Seconds from the start of the run."""


def random_prompts(
    num_prompts: int, *, input_len: int, output_len: int, spread: float, vocab_size: int, seed: int
) -> list[Prompt]:
    """Random token ids; lengths are uniform within `spread`, a share from 0 to below 1, of what is asked.

    Raises ValueError for a length below 1 or a spread out of range.
    """
    if min(num_prompts, input_len, output_len) < 1:
        raise ValueError(f"{num_prompts} prompts of {input_len} and {output_len} tokens: none may be below 1")
    if not 0 <= spread < 1:
        raise ValueError(f"spread {spread} is out of range: from 0 to below 1")
    draw = np.random.default_rng(seed)
    lens = [
        draw.integers(math.ceil(mean * (1 - spread)), math.floor(mean * (1 + spread)) + 1, num_prompts)
        for mean in (input_len, output_len)
    ]
    return [
        Prompt(content=draw.integers(0, vocab_size, num_input).tolist(), max_tokens=int(num_output))
        for num_input, num_output in zip(*lens, strict=True)
    ]


def file_prompts(path: Path, num_prompts: int, output_len: int) -> list[Prompt]:
    """JSON lines with `prompt`, a text or token ids, and `output_tokens` if wanted; from the start again if
    there are too few. Raises ValueError, naming file and line, for one that is not like that."""
    prompts: list[Prompt] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip() and len(prompts) < num_prompts:
            try:
                prompts.append(_file_prompt(json.loads(line), output_len))
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
    if not prompts:
        raise ValueError(f"{path} holds no prompt")
    return [prompts[index % len(prompts)] for index in range(num_prompts)]


def _file_prompt(entry: Any, output_len: int) -> Prompt:
    content = entry.get("prompt") if isinstance(entry, dict) else None
    is_ids = isinstance(content, list) and all(type(item) is int for item in content)
    if not content or not (is_ids or isinstance(content, str)):
        raise ValueError("expected an object whose `prompt` is a text or a list of token ids")
    num_output = entry.get("output_tokens", output_len)
    if type(num_output) is not int or num_output < 1:
        raise ValueError(f"output_tokens {num_output!r} is not a whole number from 1 up")
    return Prompt(content=content, max_tokens=num_output)


def trace_prompts(
    path: Path,
    num_prompts: int,
    *,
    load: float,
    longest_input: int | None,
    longest_output: int | None,
    vocab_size: int,
    seed: int,
) -> list[Prompt]:
    """The first requests of a trace, arriving `load` times as fast; lengths beyond the longest are cut."""
    requests = read_trace(path).scaled(load).requests[:num_prompts]
    maker = PromptMaker(vocab_size, seed=seed)
    start = requests[0].arrival
    return [
        _trace_prompt(request, number, maker, start, longest_input, longest_output)
        for number, request in enumerate(requests)
    ]


def _trace_prompt(
    request: TraceRequest,
    number: int,
    maker: PromptMaker,
    start: float,
    longest_input: int | None,
    longest_output: int | None,
) -> Prompt:
    return Prompt(
        content=maker.prompt(request, number)[:longest_input].tolist(),
        max_tokens=min(request.output_tokens, longest_output or request.output_tokens),
        arrival=request.arrival - start,
    )


def arriving(prompts: Sequence[Prompt], rate: float, burstiness: float, seed: int) -> list[Prompt]:
    """The same prompts at the times of `arrival_times`. Raises ValueError as that does."""
    arrivals = arrival_times(len(prompts), rate, burstiness, seed)
    return [replace(prompt, arrival=at) for prompt, at in zip(prompts, arrivals, strict=True)]
