"""The operation's one entry: picks an implementation at trace time."""

from __future__ import annotations

from typing import Literal

import jax

from pallas_kernels.dispatch import Implementation, Target, choose
from pallas_kernels.gated_activation.cpu import activate_cpu
from pallas_kernels.gated_activation.reference import activate_reference
from pallas_kernels.native import obstacle_in_float32

IMPLEMENTATIONS = (
    Implementation("cpu", "cpu", activate_cpu, obstacle_in_float32),
    Implementation("reference", None, activate_reference),
)


def gated_activation(
    gate_up_T2F: jax.Array, activation: Literal["silu", "gelu_tanh"], *, target: Target | None = None
) -> jax.Array:
    """`[T, F]`, of the argument's type: the first half of each row, activated, times the second, computed in
    float32 (Shazeer 2020, "GLU variants improve transformer").

    Args:
        gate_up_T2F: gates, then what they gate.
        activation: of the gates; "gelu_tanh" is the usual approximation.
        target: the device to trace for; None for any, which takes the reference.

    Raises ValueError at trace time for anything but pairs of rows.
    """
    if gate_up_T2F.ndim != 3 or gate_up_T2F.shape[1] != 2:
        raise ValueError(f"gates and values {list(gate_up_T2F.shape)} must be [T, 2, F]")
    target = target or Target()
    facts = {"native": target.native, "dtype": gate_up_T2F.dtype.name}
    chosen, _ = choose("gated_activation", IMPLEMENTATIONS, target, **facts)
    return chosen.run(gate_up_T2F, activation)
