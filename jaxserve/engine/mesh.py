"""Over which devices a model is spread: what a user names, checked against the model, or what fits it."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator

import jax
from jax.sharding import Mesh

from jaxserve.config import EngineConfig, ModelConfig
from jaxserve.model.spread import repeat_kv_heads
from jaxserve.model.stages import stages_of
from sharding import DATA, EXPERT, PIPE, TENSOR, MeshAxes, make_mesh, mesh_name, mesh_size, parse_mesh

logger = logging.getLogger(__name__)

AUTO = "auto"
WEIGHTS_SHARE = 0.5
"""Of a device's memory, the most that weights take where `auto` chooses: as much again is for pages."""
_MOST_DEVICES = 1024
"""Up to which the sizes that a model can be cut into are looked for."""
_LESS = 0.95
"""Part of a device's weights down to which a larger mesh, or one with stages, brings nothing."""
_GIB = 2**30


def mesh_of(config: EngineConfig) -> Mesh | None:
    """The devices of an engine; None for one that takes the first alone."""
    if not config.first_device:
        return make_mesh(config.mesh)
    return make_mesh(config.mesh, jax.devices()[config.first_device :])


def spread_model(model: ModelConfig, axes: MeshAxes) -> ModelConfig:
    """The model as a mesh has it: KV heads repeated where they are fewer than the devices that share them.

    Raises ValueError, naming the mesh axis, the sizes and the nearest ones that do, where the mesh does not
    divide the model.
    """
    reason = _obstacle(model, axes)
    if reason is None:
        return repeat_kv_heads(model, dict(axes).get(TENSOR, 1))
    choices = " or ".join(mesh_name(choice) for choice in _nearest(model, axes))
    raise ValueError(f"mesh {mesh_name(axes)}: {reason}; nearest to it are {choices}")


def divides(model: ModelConfig, axes: MeshAxes) -> bool:
    """Whether a model can be spread over a mesh: whether `spread_model` does not refuse it."""
    return _obstacle(model, axes) is None


def num_pools(axes: MeshAxes) -> int:
    """Parts into which the mesh cuts the KV pools; other devices have the same part as one of these."""
    sizes = dict(axes)
    return sizes.get(TENSOR, 1) * sizes.get(PIPE, 1) * sizes.get(DATA, 1)


def slots_of_each(num_slots: int, axes: MeshAxes) -> int:
    """Slots of each of a mesh's replicas, of so many in all.

    Raises ValueError, naming the mesh axis, the sizes and the nearest ones that do, where replicas do not
    divide them.
    """
    replicas = dict(axes).get(DATA, 1)
    if num_slots % replicas:
        below = next(size for size in range(replicas - 1, 0, -1) if num_slots % size == 0)
        above = next((size for size in range(replicas + 1, num_slots + 1) if num_slots % size == 0), None)
        others = dict(axes)
        choices = [mesh_name(_axes(**(others | {DATA: size}))) for size in (below, above) if size is not None]
        raise ValueError(
            f"mesh {mesh_name(axes)}: num_slots has size {num_slots}, which the {replicas} replicas of mesh "
            f"axis {DATA!r} do not divide; nearest to it are {' or '.join(choices)}, or num_slots "
            f"{-(-num_slots // replicas) * replicas}"
        )
    return num_slots // replicas


def require_devices(axes: MeshAxes, num_devices: int, platform: str) -> None:
    """Raise ValueError, naming both numbers, for a mesh of more devices than there are."""
    size = mesh_size(axes)
    if size > num_devices:
        hint = "; XLA_FLAGS=--xla_force_host_platform_device_count=N makes a CPU N devices"
        raise ValueError(
            f"mesh {mesh_name(axes)} takes {size} devices, and there are {num_devices} of {platform}"
            f"{hint if platform == 'cpu' else ''}"
        )


def resolve_mesh(
    option: str | None,
    model: ModelConfig,
    num_devices: int,
    platform: str,
    memory_bytes: Callable[[], int],
    weight_bytes: Callable[[MeshAxes], int],
    num_processes: int = 1,
    can_repeat: Callable[[int], bool] | None = None,
) -> MeshAxes:
    """The axes of the mesh that an option stands for.

    Args:
        option: as `EngineOptions.mesh`.
        model: as a single device has it.
        num_devices: that there are, of this `platform`.
        memory_bytes: of each, what is free for weights and pages; not asked where they share one memory.
        weight_bytes: of one device of a mesh.
        num_processes: that have the devices, and take part with all of them.
        can_repeat: of `auto`, whether there may be so many replicas; None has it take no more devices than
            the model needs.

    Raises ValueError, naming the axis and the sizes, for one that the model or the devices do not allow.
    """
    if num_processes > 1:
        return _spanning(option, model, num_devices, num_processes)
    if option is None:
        return ()
    if option != AUTO:
        axes = parse_mesh(option)
        spread_model(model, axes)
        require_devices(axes, num_devices, platform)
        return axes
    if num_devices == 1 or platform == "cpu":
        why = "there is one" if num_devices == 1 else "those of a CPU share its memory and its cores"
        logger.info("mesh auto: one device, since %s", why)
        return ()
    return _choose(model, num_devices, memory_bytes(), weight_bytes, can_repeat)


def _spanning(option: str | None, model: ModelConfig, num_devices: int, num_processes: int) -> MeshAxes:
    """A mesh of all devices of several processes, none of which may stand by."""
    whole = f"the {num_devices} devices of {num_processes} processes"
    if option is None:
        raise ValueError(f"no mesh is named for {whole}: expected auto, or axes that take them all")
    if option == AUTO:
        choices = itertools.chain(_legal(model, num_devices), _staged(model, num_devices))
        axes = next((axes for axes in choices if mesh_size(axes) == num_devices), None)
        if axes is None:
            raise ValueError(f"mesh auto: the model cannot be cut into as many parts as {whole}")
        logger.info("mesh auto: %s, which takes %s", mesh_name(axes), whole)
        return axes
    axes = parse_mesh(option)
    spread_model(model, axes)
    if mesh_size(axes) != num_devices:
        raise ValueError(f"mesh {mesh_name(axes)} takes {mesh_size(axes)} devices; it must take {whole}")
    return axes


def _choose(
    model: ModelConfig,
    num_devices: int,
    memory: int,
    weight_bytes: Callable[[MeshAxes], int],
    can_repeat: Callable[[int], bool] | None,
) -> MeshAxes:
    """The smallest mesh whose devices have room for as many bytes of pages as of weights; one with stages
    only where no other has. Then the same over what devices are left."""
    best: tuple[int, MeshAxes] | None = None
    for axes in itertools.chain(_legal(model, num_devices), _staged(model, num_devices)):
        own = weight_bytes(axes)
        if own <= WEIGHTS_SHARE * memory:
            logger.info(
                "mesh auto: %s of %d devices, %sthe fewest on which weights (%.2f GiB each) leave at least "
                "as much of %.2f GiB to pages",
                mesh_name(axes),
                num_devices,
                "in stages, since without them none does; " if PIPE in dict(axes) else "",
                own / _GIB,
                memory / _GIB,
            )
            return axes if can_repeat is None else _widened(model, axes, num_devices, can_repeat)
        if best is None or own < _LESS * best[0]:
            best = own, axes
    assert best is not None, "a single device is always there"
    own, axes = best
    logger.info(
        "mesh auto: %s, about the least that a device of %d can have of the model; weights take %.2f of %.2f "
        "GiB each",
        mesh_name(axes),
        num_devices,
        own / _GIB,
        memory / _GIB,
    )
    return axes


def _widened(
    model: ModelConfig, axes: MeshAxes, num_devices: int, can_repeat: Callable[[int], bool]
) -> MeshAxes:
    """The mesh over as many of the devices as it can take: `tensor` as far as it divides the model and no KV
    head is there twice, which makes every answer quicker; replicas of that on the others, which bring more
    answers at once. What is in stages stays as it is."""
    sizes = dict(axes)
    if PIPE in sizes:
        return axes
    own, expert = sizes.get(TENSOR, 1), sizes.get(EXPERT, 1)
    found: list[tuple[int, int, MeshAxes]] = []
    for tensor in range(own, num_devices // expert + 1):
        divides_heads = tensor == own or model.num_kv_heads % tensor == 0
        if not divides_heads or _obstacle(model, _axes(tensor, expert)) is not None:
            continue
        most = num_devices // (tensor * expert)
        data = next((number for number in range(most, 1, -1) if can_repeat(number)), 1)
        found.append((tensor * expert * data, tensor, _axes(tensor, expert, data=data)))
    _, tensor, wider = max(found)
    if wider != axes:
        replicas = dict(wider).get(DATA, 1)
        logger.info(
            "mesh auto: %s, since there are %d devices: tensor=%d, as many as leave the fewest over and have "
            "no KV head there twice, for quicker answers%s",
            mesh_name(wider),
            num_devices,
            tensor,
            f"; data={replicas} for more of them at once" if replicas > 1 else "",
        )
    return wider


def _legal(model: ModelConfig, most: int) -> Iterator[MeshAxes]:
    """Meshes of up to so many devices that divide the model, rising; of each size that which repeats no KV
    head rather than one that does, and then that which cuts attention most."""
    for size in range(1, most + 1):
        factors = [tensor for tensor in range(size, 0, -1) if size % tensor == 0]
        factors.sort(key=lambda tensor: model.num_kv_heads % tensor != 0)
        for tensor in factors:
            axes = _axes(tensor, size // tensor)
            if _obstacle(model, axes) is None:
                yield axes
                break


def _staged(model: ModelConfig, most: int) -> Iterator[MeshAxes]:
    """Meshes of up to so many devices with stages, rising; of each size first those with the fewest."""
    within = [(mesh_size(axes), dict(axes)) for axes in _legal(model, most // 2)]
    for size in range(2, most + 1):
        for inner, sizes in reversed(within):
            if size > inner and size % inner == 0:
                axes = _axes(**sizes, pipe=size // inner)
                if _obstacle(model, axes) is None:
                    yield axes


def _nearest(model: ModelConfig, axes: MeshAxes) -> list[MeshAxes]:
    """Meshes that divide the model and differ from this one in one axis least: the next below and above."""
    sizes = dict(axes)
    found: list[MeshAxes] = []
    for axis, size in axes:
        if axis == DATA:
            continue  # Any number of replicas is as good.
        for tries in (range(size - 1, 0, -1), range(size + 1, _MOST_DEVICES)):
            changed = (_axes(**(sizes | {axis: other})) for other in tries)
            found += [next((one for one in changed if _obstacle(model, one) is None), ())]
    # A single device is always there, and is said only where there is nothing else below.
    return [one for one in dict.fromkeys(found) if one] or [()]


def _obstacle(model: ModelConfig, axes: MeshAxes) -> str | None:
    """Why a mesh does not divide a model, or None."""
    sizes = dict(axes)
    tensor, expert, pipe = (sizes.get(axis, 1) for axis in (TENSOR, EXPERT, PIPE))
    experts = model.num_experts if any(kind.experts for kind in model.layers) else 0
    if expert > 1 and not experts:
        return f"the model has no experts for mesh axis {EXPERT!r} to cut"
    try:
        repeat_kv_heads(model, tensor)
    except ValueError as error:
        return f"{error} along mesh axis {TENSOR!r}"
    try:
        stages_of(model, pipe)
    except ValueError as error:
        return f"{error} of mesh axis {PIPE!r}"
    wholes = [("vocab", model.vocab_size, pipe * tensor * expert)]
    if not all(kind.experts for kind in model.layers):
        wholes.append(("mlp", model.intermediate_size, tensor * expert))
    for name, size, cut in wholes:
        if size % cut:
            along = _along(axes, *(() if name == "vocab" else (PIPE,)))
            return f"{name} has size {size}, which the {cut} devices of {along} do not divide"
    if experts % (tensor * expert) and (experts % expert or model.expert_intermediate_size % tensor):
        return (
            f"the model's {experts} experts of width {model.expert_intermediate_size} are cut neither whole "
            f"nor in slices by the {tensor * expert} devices of "
            f"{_along(axes, PIPE)}"
        )
    return None


def _along(axes: MeshAxes, *others: str) -> str:
    """The mesh axes that cut something, which replicas never do, nor these others."""
    return " and ".join(repr(axis) for axis, _ in axes if axis not in (DATA, *others))


def _axes(tensor: int = 1, expert: int = 1, pipe: int = 1, data: int = 1) -> MeshAxes:
    return parse_mesh(f"{TENSOR}={tensor},{EXPERT}={expert},{PIPE}={pipe},{DATA}={data}")
