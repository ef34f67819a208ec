"""What a user may say of a mesh, and what `auto` makes of a model and its devices."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable

import pytest

from jaxserve.config import LayerKind, ModelConfig
from jaxserve.engine.build import resolve_config, resolve_here
from jaxserve.engine.memory import weight_bytes
from jaxserve.engine.mesh import require_devices, resolve_mesh, spread_model
from jaxserve.engine.options import EngineOptions
from jaxserve.planning.models import find_model
from sharding import MeshAxes, mesh_name, mesh_size, parse_mesh
from tests.sharding.test_shardings import MODEL

GIB = 2**30
DENSE = dataclasses.replace(MODEL, layers=(LayerKind(),), num_experts=0)


def test_a_mesh_is_read_in_any_order_and_axes_of_one_are_none() -> None:
    axes = parse_mesh("tensor=4, expert=2")
    assert axes == parse_mesh("expert=2,tensor=4") == (("expert", 2), ("tensor", 4))
    assert mesh_name(axes) == "tensor=4,expert=2"
    assert parse_mesh("tensor=1") == parse_mesh(mesh_name(())) == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("8", "mesh '8': expected auto, or tensor=N, expert=N, pipe=N and data=N, with commas"),
        ("tensor=0", "mesh 'tensor=0': expected"),
        ("rows=2", "mesh 'rows=2': expected"),
        ("tensor=2,tensor=4", "tensor is there twice"),
    ],
)
def test_what_is_no_mesh_is_refused_with_the_form_of_one(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineOptions(mesh=text)


@pytest.mark.parametrize(
    ("model", "mesh", "message"),
    [
        (
            dataclasses.replace(DENSE, intermediate_size=96),
            "tensor=64",
            "mesh tensor=64: kv_heads has size 8, each with 2 queries, which 64 devices neither divide nor "
            "repeat evenly along mesh axis 'tensor'; nearest to it are tensor=16",
        ),
        (
            dataclasses.replace(DENSE, intermediate_size=68),
            "tensor=8",
            "mesh tensor=8: mlp has size 68, which the 8 devices of 'tensor' do not divide; nearest to it "
            "are tensor=4",
        ),
        (
            dataclasses.replace(DENSE, num_kv_heads=16, vocab_size=240, intermediate_size=48),
            "tensor=6",
            "tensor=6: kv_heads has size 16, each with 1 queries, .* nearest to it are tensor=4 or tensor=8",
        ),
        (DENSE, "expert=2", "mesh expert=2: the model has no experts for mesh axis 'expert' to cut"),
        (
            dataclasses.replace(MODEL, num_experts=6),
            "tensor=2,expert=4",
            "the model's 6 experts of width 24 are cut neither whole nor in slices by the 8 devices of "
            "'expert' and 'tensor'; nearest to it are tensor=2,expert=2",
        ),
    ],
    ids=["kv_heads", "mlp", "both_sides", "no_experts", "experts"],
)
def test_a_mesh_that_does_not_divide_the_model_names_the_nearest(
    model: ModelConfig, mesh: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        spread_model(model, parse_mesh(mesh))


def test_more_devices_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match=r"mesh tensor=8 takes 8 devices, and there are 4 of tpu$"):
        require_devices(parse_mesh("tensor=8"), 4, "tpu")
    with pytest.raises(ValueError, match="there are 1 of cpu; XLA_FLAGS=--xla_force_host"):
        require_devices(parse_mesh("tensor=2"), 1, "cpu")


def test_few_kv_heads_are_repeated_and_their_queries_shared_out() -> None:
    spread = spread_model(dataclasses.replace(MODEL, num_kv_heads=2), parse_mesh("tensor=8"))
    assert (spread.num_kv_heads, spread.queries_per_kv) == (8, 2)
    options = EngineOptions(kv_memory=10**7)
    config = resolve_config(MODEL, options, "cpu", "float32", 128, parse_mesh("tensor=8"))
    assert config.mesh == (("tensor", 8),)


def test_eight_bits_are_not_shape_invariant_by_default_on_a_mesh(native_kernels: None) -> None:
    options = EngineOptions(quantize="int8", max_model_len=64)
    assert resolve_here(DENSE, options).deterministic
    assert not resolve_here(DENSE, dataclasses.replace(options, mesh="tensor=2")).deterministic


def any_number(number: int) -> bool:
    """Any number of replicas may be there."""
    return True


def chosen(name: str, num_devices: int, memory: int, can_repeat: Callable[[int], bool] | None = None) -> str:
    model = find_model(name)

    def weights(axes: MeshAxes) -> int:
        return weight_bytes(model, "bfloat16", "stacked", None, axes)

    asked = "auto", model, num_devices, "tpu", lambda: memory, weights
    return mesh_name(resolve_mesh(*asked, can_repeat=can_repeat))


@pytest.mark.parametrize(
    ("model", "num_devices", "gib", "mesh"),
    [
        ("llama-3.1-8b", 8, 95, "tensor=1"),
        ("llama-3.1-8b", 8, 31, "tensor=1"),
        ("llama-3.1-8b", 8, 16, "tensor=2"),
        ("llama-3.1-70b", 8, 31, "tensor=8"),
        # Eight KV heads would have to be there twice.
        ("mixtral-8x22b", 64, 31, "tensor=8,expert=4"),
    ],
)
def test_auto_takes_the_fewest_devices_that_leave_room_for_pages(
    model: str, num_devices: int, gib: int, mesh: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "jaxserve"):
        assert chosen(model, num_devices, gib * GIB) == mesh
    assert "mesh auto: " in caplog.text


@pytest.mark.parametrize(
    ("num_devices", "gib", "mesh", "why"),
    [
        (8, 4.0, "tensor=2", "the fewest on which weights (1."),
        # Two heads are for two devices; what these leave is cut in stages.
        (8, 2.1, "tensor=2,pipe=2", "in stages, since without them none does; the fewest"),
        (8, 1.1, "tensor=2,pipe=4", "in stages, since without them none does; the fewest"),
        (3, 1.1, "tensor=2", "about the least that a device of 3 can have"),
    ],
)
def test_auto_cuts_in_stages_what_cannot_be_cut_otherwise(
    num_devices: int, gib: float, mesh: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = dataclasses.replace(DENSE, num_heads=2, num_kv_heads=2, layers=(LayerKind(),) * 12)

    def weights(axes: MeshAxes) -> int:
        return int(3.7 * GIB / mesh_size(axes))

    with caplog.at_level(logging.INFO, "jaxserve"):
        found = resolve_mesh("auto", model, num_devices, "tpu", lambda: int(gib * GIB), weights)
    assert mesh_name(found) == mesh
    assert why in caplog.text


@pytest.mark.parametrize(
    ("model", "num_devices", "gib", "can_repeat", "mesh"),
    [
        # Eight KV heads, and room on each device: all of them, for quicker answers.
        ("llama-3.1-8b", 8, 95, any_number, "tensor=8"),
        ("llama-3.1-8b", 16, 31, any_number, "tensor=8,data=2"),
        # Six do not divide them; replicas of two take all six, if slots allow, where four leave two over.
        ("llama-3.1-8b", 6, 31, any_number, "tensor=2,data=3"),
        ("llama-3.1-8b", 6, 31, lambda number: 64 % number == 0, "tensor=4"),
        # Four KV heads would be there twice on eight devices.
        ("qwen3-30b-a3b", 8, 95, any_number, "tensor=4,data=2"),
        # Three KV heads.
        ("smollm2-135m", 8, 31, any_number, "tensor=1,data=8"),
        ("llama-3.1-70b", 8, 31, any_number, "tensor=8"),
        ("mixtral-8x22b", 64, 31, any_number, "tensor=8,expert=4,data=2"),
    ],
)
def test_auto_takes_the_devices_that_are_left_along_tensor_and_then_along_data(
    model: str,
    num_devices: int,
    gib: int,
    can_repeat: Callable[[int], bool],
    mesh: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "jaxserve"):
        assert chosen(model, num_devices, gib * GIB, can_repeat) == mesh.removeprefix("tensor=1,")
    widened = "KV head there twice, for quicker answers" in caplog.text
    assert widened == (model != "llama-3.1-70b")
    assert ("for more of them at once" in caplog.text) == ("data" in mesh)


def test_replicas_are_not_chosen_where_options_do_not_allow_them() -> None:
    assert EngineOptions(mesh="auto").can_repeat(3)
    assert not EngineOptions(mesh="auto", num_slots=64).can_repeat(3)
    assert EngineOptions(mesh="auto", num_slots=64).can_repeat(4)
    assert not EngineOptions(mesh="auto", host_kv_memory=2**30).can_repeat(2)


def test_auto_on_a_cpu_is_one_device_since_more_gain_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "jaxserve"):
        assert resolve_mesh("auto", MODEL, 8, "cpu", lambda: 0, lambda axes: 0) == ()
    assert "share its memory" in caplog.text


def spanning(option: str | None, model: ModelConfig, num_devices: int) -> str:
    """The mesh of a job of two processes."""
    return mesh_name(resolve_mesh(option, model, num_devices, "cpu", lambda: 0, lambda axes: 0, 2))


def test_a_job_of_several_processes_takes_all_of_their_devices() -> None:
    assert spanning("tensor=4", DENSE, 4) == "tensor=4"
    layers = dataclasses.replace(DENSE, layers=(LayerKind(),) * 2)
    assert spanning("tensor=2,pipe=2", layers, 4) == "tensor=2,pipe=2"
    assert spanning("auto", DENSE, 2) == "tensor=2"
    few_heads = dataclasses.replace(layers, num_heads=2, num_kv_heads=2)
    assert spanning("auto", few_heads, 4) == "tensor=2,pipe=2"


@pytest.mark.parametrize(
    ("option", "num_devices", "message"),
    [
        (None, 4, "no mesh is named for the 4 devices of 2 processes"),
        ("tensor=2", 4, "tensor=2 takes 2 devices; it must take the 4 devices of 2 processes"),
        ("tensor=8", 4, "tensor=8 takes 8 devices; it must take the 4 devices"),
        ("auto", 7, "cannot be cut into as many parts as the 7 devices"),
    ],
)
def test_a_mesh_that_leaves_a_process_out_is_refused(
    option: str | None, num_devices: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        spanning(option, DENSE, num_devices)
