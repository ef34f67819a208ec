"""A second engine of a model, on devices of its own, that computes prompts for the one that decodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from jaxserve.config import EngineConfig, ModelConfig
from jaxserve.engine.mesh import AUTO, spread_model
from jaxserve.engine.options import EngineOptions
from jaxserve.speculation import read_speculative
from sharding import DATA, PIPE, TENSOR, MeshAxes, mesh_name, mesh_size, parse_mesh

_ONE_DEVICE: MeshAxes = ((TENSOR, 1),)


def check_prefill(
    options: EngineOptions,
    axes: MeshAxes,
    model: ModelConfig,
    num_devices: int,
    platform: str,
    num_processes: int = 1,
) -> None:
    """Raise ValueError, naming the mesh axis and the sizes, where prompts cannot be computed apart.

    Args:
        options: with a `prefill_mesh`.
        axes: of the mesh that decodes.
        model: as a single device has it.
        num_devices: that there are for both, of this `platform`.
        num_processes: that have them.
    """
    name = f"prefill_mesh {options.prefill_mesh}"
    if options.mesh == AUTO:
        raise ValueError(f"{name} with mesh auto: name the axes of both")
    own = parse_mesh(options.prefill_mesh or "")
    for which, sizes in ((f"mesh {mesh_name(axes)}", dict(axes)), (name, dict(own))):
        if DATA in sizes:
            raise ValueError(
                f"{which}: prompts are computed apart without mesh axis {DATA!r}, not {sizes[DATA]}"
            )
    try:
        spread_model(model, own)
    except ValueError as error:
        raise ValueError(f"prefill_{error}") from error
    stages, own_stages = dict(axes).get(PIPE, 1), dict(own).get(PIPE, 1)
    if stages != own_stages:
        raise ValueError(
            f"{name} has {own_stages} stages of mesh axis {PIPE!r} and mesh {mesh_name(axes)} has {stages}: "
            "pages are moved between equally many"
        )
    if num_processes > 1:
        raise ValueError(f"{name} with {num_processes} processes: it works in a single one")
    if options.host_kv_memory is not None:
        raise ValueError(f"{name} with host_kv_memory {options.host_kv_memory}: one of them at a time")
    if options.speculative is not None and read_speculative(options.speculative).model:
        raise ValueError(f"{name} with speculative {options.speculative!r}: a draft model runs on one device")
    if options.deterministic and own != axes:
        raise ValueError(
            f"{name} with deterministic and mesh {mesh_name(axes)}: sums over other devices are rounded "
            "otherwise, so both have to be the same"
        )
    size, own_size = mesh_size(axes), mesh_size(own)
    if size + own_size > num_devices:
        raise ValueError(
            f"{name} takes {own_size} devices beside the {size} of mesh {mesh_name(axes)}, and there are "
            f"{num_devices} of {platform}"
        )


def prefill_options(options: EngineOptions, decoder: EngineConfig) -> EngineOptions:
    """What the second engine is built by: as the first, without what concerns answers alone."""
    return replace(
        options,
        mesh=options.prefill_mesh,
        prefill_mesh=None,
        num_slots=decoder.num_slots,
        deterministic=decoder.deterministic,
        speculative=None,
        max_iterations=1,
    )


def with_counterpart(config: EngineConfig) -> EngineConfig:
    """The config of an engine beside which there is another: it names its devices."""
    return replace(config, mesh=config.mesh or _ONE_DEVICE)


def for_prompts(config: EngineConfig, first_device: int) -> EngineConfig:
    """The config of one that computes prompts alone, on the devices from the first on."""
    return replace(with_counterpart(config), first_device=first_device, decode_rows=())


def told_apart(on_progress: Callable[[str, int, int], None]) -> Callable[[str, int, int], None]:
    """Tells of the stages in which the second engine is built by names of their own."""
    return lambda stage, done, total: on_progress(f"prefill {stage}", done, total)
