"""Weights `[out, in]` in a type of their own, int8 or fp8, with scales beside them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from jaxserve.weights.quantised.scheme import FLOATS, Expected, Matrix, Scheme
from jaxserve.weights.settings import Settings

Strategy = Literal["tensor", "channel", "group", "block", "tensor or channel"]
"""What a scale is for; `group` runs of inputs, `block` a rectangle of outputs and inputs."""


@dataclass(frozen=True, kw_only=True)
class PlainTypeScheme(Scheme):
    """One tensor for the values, one for the scales, perhaps zeros, perhaps the activations' own scale."""

    strategy: Strategy
    scale_name: str = "weight_scale"
    block_outputs: int = 0
    """Outputs of a block; its inputs are `group`."""
    input_scale: bool = False
    """Whether there is a scale for activations. It is not used: those here have theirs as they come."""

    def _group_label(self) -> str:
        return f"-{self.block_outputs}x{self.group}" if self.strategy == "block" else super()._group_label()

    @property
    def suffixes(self) -> tuple[str, ...]:
        more = ("weight_zero_point",) if self.zeros else ()
        return ("weight", self.scale_name, *more, *(("input_scale",) if self.input_scale else ()))

    def group_in(self, num_inputs: int) -> int:
        """Blocks are kept as groups whose scales repeat from output to output; the last may be cut short."""
        if self.strategy != "block":
            return self.group
        return num_inputs if num_inputs <= self.group else math.gcd(num_inputs, self.group)

    def tensors(self, shape: tuple[int, int]) -> Mapping[str, Expected]:
        scales = self._scale_shapes(shape)
        stored = "F8_E4M3" if self.kind == "float" else "I8"
        tensors = {
            "weight": Expected.of(shape, stored),
            self.scale_name: Expected(scales, FLOATS),
            "weight_zero_point": Expected(scales, ("I8",)),
            "input_scale": Expected(((), (1,)), FLOATS),
        }
        return {name: tensors[name] for name in self.suffixes}

    def _scale_shapes(self, shape: tuple[int, int]) -> tuple[tuple[int, ...], ...]:
        outputs, inputs = shape
        tensor, channel = ((1,), ()), ((outputs, 1), (outputs,))
        shapes: Mapping[Strategy, tuple[tuple[int, ...], ...]] = {
            "tensor": tensor,
            "channel": channel,
            "tensor or channel": channel + tensor,
            "group": ((outputs, self.num_groups(inputs) if self.strategy == "group" else 1),),
            "block": ((-(-outputs // (self.block_outputs or 1)), -(-inputs // (self.group or 1))),),
        }
        return shapes[self.strategy]

    def read(self, found: Mapping[str, np.ndarray], shape: tuple[int, int]) -> Matrix:
        zeros = self._by_row(found["weight_zero_point"], shape) if self.zeros else None
        return Matrix(found["weight"], self._by_row(found[self.scale_name], shape), zeros)

    def _by_row(self, scales: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
        """`[out, groups]`."""
        outputs, inputs = shape
        if self.strategy == "block":
            of_output = np.arange(outputs) // self.block_outputs
            of_group = np.arange(0, inputs, self.group_in(inputs)) // self.group
            return scales[of_output[:, None], of_group[None]]
        if self.strategy == "group":
            return scales
        return np.broadcast_to(scales.reshape(-1, 1), (outputs, 1))


def fp8_scheme(settings: Settings) -> Scheme:
    """What the `quantization_config` of an fp8 release says of its modules."""
    settings.insist({"fmt": "e4m3"})
    static = settings.choice("activation_scheme", ("dynamic", "static"), "dynamic") == "static"
    block = settings.get("weight_block_size")
    if block is None:
        return PlainTypeScheme(
            method="fp8", kind="float", bits=8, strategy="tensor or channel", input_scale=static
        )
    block_outputs, block_inputs = block_sizes(settings, "weight_block_size")
    return PlainTypeScheme(
        method="fp8",
        kind="float",
        bits=8,
        group=block_inputs,
        strategy="block",
        scale_name="weight_scale_inv",
        block_outputs=block_outputs,
        input_scale=static,
    )


def block_sizes(settings: Settings, key: str) -> tuple[int, int]:
    """Outputs and inputs of a block."""
    block = settings.get(key)
    if not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
        settings.refuse(key, "two positive integers")
    return block[0], block[1]
