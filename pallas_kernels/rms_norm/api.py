"""The operation's two entries: each picks an implementation at trace time."""

from __future__ import annotations

import jax

from pallas_kernels.dispatch import Implementation, Target, choose
from pallas_kernels.native import obstacle_in_float32
from pallas_kernels.rms_norm.cpu import add_and_norm_cpu, norm_cpu
from pallas_kernels.rms_norm.reference import add_and_norm_reference, norm_reference

IMPLEMENTATIONS = (
    Implementation("cpu", "cpu", norm_cpu, obstacle_in_float32),
    Implementation("reference", None, norm_reference),
)
ADDING_IMPLEMENTATIONS = (
    Implementation("cpu", "cpu", add_and_norm_cpu, obstacle_in_float32),
    Implementation("reference", None, add_and_norm_reference),
)


def rms_norm(
    x: jax.Array,
    weight_D: jax.Array,
    eps: float,
    *,
    exact_order: bool = False,
    target: Target | None = None,
) -> jax.Array:
    """Root-mean-square norm over the last axis, computed in float32 (Zhang and Sennrich 2019).

    Args:
        x: `[..., D]`; the result has its type.
        weight_D: what each number is multiplied with in the end.
        eps: added to the mean of the squares.
        exact_order: whether a row's result must be the same bits however many rows there are.
        target: the device to trace for; None for any, which takes the reference.

    Raises ValueError at trace time on shapes that disagree.
    """
    _check(x, x, weight_D)
    target = target or Target()
    chosen, _ = choose("rms_norm", IMPLEMENTATIONS, target, native=target.native, dtype=x.dtype.name)
    return chosen.run(x, weight_D, eps, exact_order=exact_order)


def add_and_rms_norm(
    x: jax.Array,
    y: jax.Array,
    weight_D: jax.Array,
    eps: float,
    *,
    exact_order: bool = False,
    target: Target | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The sum of x and y, `[..., D]` both, and its norm; arguments and errors as of `rms_norm`."""
    _check(x, y, weight_D)
    target = target or Target()
    chosen, _ = choose("rms_norm", ADDING_IMPLEMENTATIONS, target, native=target.native, dtype=x.dtype.name)
    return chosen.run(x, y, weight_D, eps, exact_order=exact_order)


def _check(x: jax.Array, y: jax.Array, weight_D: jax.Array) -> None:
    if x.shape != y.shape or x.dtype != y.dtype or weight_D.shape != x.shape[-1:]:
        raise ValueError(
            f"rows {x.dtype}{list(x.shape)}, {y.dtype}{list(y.shape)} and weights {list(weight_D.shape)}: "
            "rows must agree, and there must be a weight for each number of a row"
        )
