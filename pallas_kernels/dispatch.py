"""Which implementation of an operation runs: by platform, then by what each can do, in measured order.

An operation has a table of implementations, the fastest first. The first one made for the platform that can
do what is asked is taken, unless one further down is known to be faster at it; a name in `Target.overrides`
goes before all that. Each choice is logged once, with the stored measurement it rests on, if there is one.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax

LOGGER = logging.getLogger(__name__)
_CAPABILITIES = {"H100": "9.0", "H200": "9.0"}
_chosen: ContextVar[dict[str, str] | None] = ContextVar("chosen", default=None)


@dataclass(frozen=True)
class Target:
    """The kind of device that a program is traced for."""

    platform: str = "cpu"
    """cpu, tpu or gpu, as in jax."""
    device_kind: str = ""
    """The vendor's name, "TPU v6 lite" say."""
    native: bool = False
    """Whether the kernels of `pallas_kernels.native` are loaded, for programs of this process on CPU."""
    num_cores: int = 1
    """Cores that share one program of one device (two on TPU v4 and v5p)."""
    capability: str = ""
    """An NVIDIA GPU's compute capability, "9.0" say; empty where jax does not tell."""
    overrides: tuple[tuple[str, str], ...] = ()
    """(operation, implementation): taken whatever the platform; a kernel for another one is interpreted."""

    @classmethod
    def of(cls, device: Any) -> Target:
        """That of a jax device, present or only described."""
        platform = "gpu" if device.platform in ("cuda", "rocm") else device.platform
        kind = device.device_kind
        # A device that is only described has no capability.
        described = next((value for name, value in _CAPABILITIES.items() if name in kind), "")
        return cls(
            platform,
            kind,
            num_cores=getattr(device, "num_cores", None) or 1,
            capability=getattr(device, "compute_capability", None) or described,
        )


@dataclass(frozen=True)
class Implementation:
    """One way to do an operation."""

    name: str
    platform: str | None
    """The platform it is made for; None for any."""
    run: Callable[..., Any]
    obstacle: Callable[..., str | None] = lambda **_: None
    """From what is static about a call to the reason why this cannot do it, or None."""
    outdone: Callable[..., str | None] = lambda **_: None
    """The same to the reason why one further down the table is faster; an override by name does not ask."""
    evidence: str = ""
    """The file of results that puts it before those further down; empty where none is stored."""


def choose(
    operation: str, table: Sequence[Implementation], target: Target, **facts: Any
) -> tuple[Implementation, bool]:
    """An implementation for a call, and whether to interpret it since it is made for another platform.

    Args:
        operation: its name, for overrides and messages.
        table: what there is, the fastest first.
        facts: what is static about the call, hashable.

    Raises ValueError, saying why, where an override names none or one that cannot do it, or none can.
    """
    entry, interpreted = _choose(operation, table, target, facts)
    chosen = _chosen.get()
    if chosen is not None:
        names = {*chosen.get(operation, entry.name).split(", "), entry.name}
        chosen[operation] = ", ".join(sorted(names))
    return entry, interpreted


@contextmanager
def choices_recorded() -> Iterator[Mapping[str, str]]:
    """Yields what is chosen for each operation by programs that this thread traces inside."""
    chosen: dict[str, str] = {}
    token = _chosen.set(chosen)
    try:
        yield chosen
    finally:
        _chosen.reset(token)


def _choose(
    operation: str, table: Sequence[Implementation], target: Target, facts: Mapping[str, Any]
) -> tuple[Implementation, bool]:
    wanted = dict(target.overrides).get(operation)
    if wanted is not None:
        named = {entry.name: entry for entry in table}
        if wanted not in named:
            raise ValueError(f"{operation} has no implementation {wanted!r}: choose from {', '.join(named)}")
        if reason := named[wanted].obstacle(**facts):
            raise ValueError(f"{operation} by {wanted}: {reason}")
        return named[wanted], named[wanted].platform not in (None, target.platform)
    reasons: list[str] = []
    for entry in table:
        if entry.platform not in (None, target.platform):
            continue
        reason = entry.obstacle(**facts) or entry.outdone(**facts)
        if reason is None:
            if entry.evidence:
                reasons.append(f"measured in {entry.evidence}")
            _log(operation, entry.name, target.device_kind or target.platform, "; ".join(reasons))
            return entry, False
        reasons.append(f"not {entry.name}: {reason}")
    raise ValueError(f"nothing does {operation} on {target.platform}: {'; '.join(reasons)}")


@functools.cache
def _log(operation: str, name: str, device: str, reasons: str) -> None:
    LOGGER.info("%s by %s on %s%s", operation, name, device, f" ({reasons})" if reasons else "")


def interpreter(interpret: bool) -> Any:
    """What `pallas_call` takes to run a TPU kernel here."""
    if not interpret:
        return False
    from jax.experimental.pallas import tpu as pltpu

    return pltpu.InterpretParams(uninitialized_memory="nan")


def default_target() -> Target:
    """That of the device on which jax computes by default."""
    return Target.of(jax.devices()[0])


def mosaic_gpu_missing() -> str | None:
    """Why kernels through JAX's Mosaic GPU cannot run here, whatever they are asked, or None."""
    try:
        import pallas_kernels.mosaic_gpu  # noqa: F401
    except ImportError as failure:  # JAX 0.10.2 does not say that it needs absl-py
        return f"JAX's Mosaic GPU cannot be imported: {failure}"
    return None
