"""Which stored tensors make up a parameter, and where in it each of them goes.

A checkpoint stores queries, keys, values, gates and so on apart. Each of them is read straight into a view
of the fused parameter, whose elements are in the stored order: fusing, regrouping and reordering rotary
rows cost no further copy. Axes: K kv heads, G queries per kv head, h head size, D hidden, F feed-forward
width, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np

from jaxserve.config import ModelConfig
from jaxserve.model.parameters import ParameterInfo

_View = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Naming:
    """How a family's tensors are called and kept in one file format."""

    names: Mapping[str, str]
    """Template for each role, with {layer} and {expert}; expert weights without {expert} are stacked."""
    interleaved_rotary: bool = False
    """Query and key rows alternate between the two halves of a head, as in Llama's own release."""
    norm_offset: float = 0.0
    """Added to every norm weight as stored, to give the whole factor."""


@dataclass(frozen=True)
class Part:
    """One stored tensor of a parameter: its name and shape there, and the view of the parameter it fills."""

    tensor: str
    shape: tuple[int, ...]
    place: _View
    """Of an array whose axes before the inputs are the parameter's; its inputs may be fewer, or one axis."""


def parts_of(name: str, info: ParameterInfo, config: ModelConfig, naming: Naming) -> Iterator[Part]:
    """The stored tensors that together fill the parameter with the given full name."""
    prefix, _, field = name.rpartition(".")
    layer = prefix.removeprefix("layers.")

    def part(role: str, shape: tuple[int, ...], place: _View, expert: int | None = None) -> Part:
        return Part(naming.names[role].format(layer=layer, expert=expert), shape, place)

    if field in ("qkv", "qkv_bias"):
        yield from _attention_parts(field.removeprefix("qkv"), info, naming, part)
    elif field == "o":
        hidden, *heads = info.shape
        yield part("o", (hidden, prod(heads)), lambda out: out.reshape(hidden, -1))
    elif field == "gate_up":
        for index, role in enumerate(("gate", "up")):
            yield part(role, info.shape[1:], lambda out, index=index: out[index])
    elif field in ("expert_gate_up", "expert_down"):
        yield from _expert_parts(field, config.num_experts, info, naming, part)
    else:
        yield part(field, info.shape, lambda out: out)


def _attention_parts(
    suffix: str, info: ParameterInfo, naming: Naming, part: Callable[..., Part]
) -> Iterator[Part]:
    """Queries, keys and values of `[K, G + 2, h, ...]`, or their biases."""
    kv_heads, groups, head, *rest = info.shape
    queries = groups - 2

    def rotary(out: np.ndarray) -> np.ndarray:
        if not naming.interleaved_rotary:
            return out
        return out.reshape(kv_heads, groups, 2, head // 2, *out.shape[3:]).swapaxes(2, 3)

    stored_keys = (kv_heads * head, *rest)
    yield part("q" + suffix, (kv_heads * queries * head, *rest), lambda out: rotary(out)[:, :queries])
    yield part("k" + suffix, stored_keys, lambda out: rotary(out)[:, queries])
    yield part("v" + suffix, stored_keys, lambda out: out[:, queries + 1])


def _expert_parts(
    field: str, num_experts: int, info: ParameterInfo, naming: Naming, part: Callable[..., Part]
) -> Iterator[Part]:
    """Gate and up of `[E, 2, F, D]`, or down of `[E, D, F]`; stored for each expert, or stacked."""
    if field == "expert_down":
        places: dict[str, _View] = {"expert_down": lambda out: out}
    else:
        places = {"expert_gate": lambda out: out[:, 0], "expert_up": lambda out: out[:, 1]}
    matrix = info.shape[-2:]
    for role, place in places.items():
        if "{expert}" not in naming.names[role]:
            yield part(role, (num_experts, *matrix), place)
            continue
        for expert in range(num_experts):
            yield part(role, matrix, lambda out, expert=expert, place=place: place(out)[expert], expert)
