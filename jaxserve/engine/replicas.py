"""Replicas of the state on one mesh: each device runs the engine's programs on the part of its own replica.

Inside `per_replica` a program is as it is for one replica: its slots, its page ids, its rows. So what follows
from them, attention and sampling included, never crosses the mesh axis 'data'. Outside, an array of the state
has those of all replicas one after another along one of its axes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.config import EngineConfig
from jaxserve.engine.packing import Packing
from jaxserve.engine.slots import PackedLoad
from jaxserve.engine.state import DeviceState
from jaxserve.engine.step import PlanFormat
from jaxserve.plan import IntArray, SlotLoad, StepPlan
from jaxserve.replica_plans import split_plan
from sharding import DATA, AnyMesh, per_replica

OWN, ALL = PartitionSpec(DATA), PartitionSpec()
"""Of an array that has a part for each replica along its first axis, and of one that all have."""
LOAD = PackedLoad(OWN, *(ALL,) * (len(dataclasses.fields(PackedLoad)) - 1))  # type: ignore[arg-type]
"""Where a load lies: each replica hears which slot is meant, if it is one of its own."""


def replica_axes(state: DeviceState) -> DeviceState:
    """Of each array of a state the axis along which it has the parts of replicas."""
    return jax.tree.map(lambda _: 0, state).replace(page_table=1)


def state_specs(state: DeviceState) -> DeviceState:
    """A tree of PartitionSpec, of the replicas alone."""
    return jax.tree.map(lambda axis: PartitionSpec(*(None,) * axis, DATA), replica_axes(state))


def parameter_specs(params: Any) -> Any:
    """A tree of PartitionSpec, of the replicas alone: which arrays they share out. `params`: shapes that say
    where they lie."""

    def own(array: jax.ShapeDtypeStruct) -> PartitionSpec:
        cuts = array.sharding.spec  # type: ignore[union-attr]
        return PartitionSpec(*(DATA if cut == DATA or DATA in (cut or ()) else None for cut in cuts))

    return jax.tree.map(own, params)


def of_all_replicas(state: DeviceState, mesh: AnyMesh) -> DeviceState:
    """The shapes of all replicas' state from those of one's."""

    def widened(array: Any, axis: int) -> jax.ShapeDtypeStruct:
        shape = list(array.shape)
        shape[axis] *= mesh.shape[DATA]
        return jax.ShapeDtypeStruct(tuple(shape), array.dtype)

    return jax.tree.map(widened, state, replica_axes(state))


def shardings_of_all(one: DeviceState, mesh: AnyMesh) -> DeviceState:
    """Where the arrays of all replicas lie, from where those of one do on the other axes of the mesh."""

    def with_replicas(place: NamedSharding, axis: int) -> NamedSharding:
        spec = [*place.spec, *(None,) * (1 + axis - len(place.spec))]
        cut = spec[axis]
        spec[axis] = (DATA, *((cut,) if isinstance(cut, str) else cut or ()))
        return NamedSharding(mesh, PartitionSpec(*spec))

    return jax.tree.map(with_replicas, one, replica_axes(one))


def make_replicas(make: Callable[[], DeviceState], mesh: Mesh) -> Callable[[], DeviceState]:
    """What makes the state of every replica, from what makes one's."""
    specs = state_specs(jax.eval_shape(make))
    return per_replica(make, mesh, in_specs=(), out_specs=specs)


def step_of_replicas(
    run: Callable[..., tuple[DeviceState, jax.Array]],
    params: Any,
    state: DeviceState,
    num_counts: int,
    mesh: Mesh,
) -> tuple[Callable[..., tuple[DeviceState, jax.Array]], tuple[Any, ...]]:
    """A step of parameters, state, a vector for each replica, and `num_counts` numbers for all, and where
    the latter two lie. Its result has an axis of replicas in front."""

    def own(params: Any, state: DeviceState, vectors: jax.Array, *counts: jax.Array) -> Any:
        state, result = run(params, state, vectors[0], *counts)
        return state, result[None]

    specs, given = state_specs(state), (OWN, *(ALL,) * num_counts)
    in_specs = (parameter_specs(params), specs, *given)
    return per_replica(own, mesh, in_specs=in_specs, out_specs=(specs, OWN)), given


def slot_program_of_replicas(
    name: str, program: Callable[..., DeviceState], state: DeviceState, mesh: Mesh
) -> tuple[Callable[..., DeviceState], tuple[Any, ...]]:
    """One of `SlotPrograms` for all replicas, of the state and of what a `ReplicaPacking` makes, and where
    that lies."""

    def load(state: DeviceState, load: PackedLoad) -> DeviceState:
        return program(state, dataclasses.replace(load, place=load.place[0]))

    def first(state: DeviceState, own: jax.Array, *others: jax.Array) -> DeviceState:
        return program(state, own[0], *others)

    given = {"load_slot": (LOAD,), "copy_pages": (OWN,), "load_masks": (OWN, ALL, ALL)}[name]
    specs, own = state_specs(state), load if name == "load_slot" else first
    return per_replica(own, mesh, in_specs=(specs, *given), out_specs=specs), given


def on_mesh(given: Any, specs: Any, mesh: AnyMesh) -> Any:
    """Shapes of what the host has, as it lies on the mesh; `specs`: a PartitionSpec for each array."""
    return jax.tree.map(
        lambda spec, array: jax.ShapeDtypeStruct(
            array.shape, array.dtype, sharding=NamedSharding(mesh, spec)
        ),
        specs,
        given,
        is_leaf=lambda leaf: isinstance(leaf, PartitionSpec),
    )


def packing_for(config: EngineConfig) -> Packing:
    """For an engine of this config."""
    return Packing(config) if config.num_replicas == 1 else ReplicaPacking(config)


class ReplicaPacking(Packing):
    """What the host says to several replicas, whose slots it numbers through."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._num_replicas = config.num_replicas

    def load(self, load: SlotLoad) -> PackedLoad:
        replica, slot = divmod(load.slot, self._config.num_slots)
        packed = super().load(dataclasses.replace(load, slot=slot))
        place = np.tile(packed.place, (self._num_replicas, 1))
        place[:, 0] = self._nowhere
        place[replica, 0] = slot
        return dataclasses.replace(packed, place=place)

    def copies(self, load: SlotLoad) -> np.ndarray:
        own = super().copies(load)
        packed = np.zeros((self._num_replicas, *own.shape), np.int32)
        packed[load.slot // self._config.num_slots] = own
        return packed

    def masks(
        self, slots: IntArray, masks: npt.NDArray[np.uint32], ahead: IntArray | None
    ) -> tuple[np.ndarray, ...]:
        packed, *others = super().masks(slots, masks, ahead)
        own = np.full((self._num_replicas, len(packed)), self._nowhere, np.int32)
        replicas, local = np.divmod(slots, self._config.num_slots)
        own[replicas, np.arange(len(slots))] = local
        return own, *others

    def plan(self, form: PlanFormat, plan: StepPlan) -> np.ndarray:
        return np.stack([form.pack(part) for part in self._split(plan)])

    def rows(self, plan: StepPlan, packed: np.ndarray) -> np.ndarray:
        own = [int(part.num_logit_rows.sum()) for part in self._split(plan)]
        if packed.ndim == 3:
            return np.concatenate([result[:num] for result, num in zip(packed, own, strict=True)])
        iterations = packed[:, : plan.num_iterations]
        joined = [result[:, :num] for result, num in zip(iterations, own, strict=True)]
        return np.concatenate(joined, axis=1).reshape(-1, packed.shape[-1])

    def _split(self, plan: StepPlan) -> list[StepPlan]:
        return split_plan(plan, self._num_replicas, self._config.num_slots)

    @property
    def _nowhere(self) -> int:
        """A slot that no replica has, its padding's included."""
        return self._config.num_slots + 1
