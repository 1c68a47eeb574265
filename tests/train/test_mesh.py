"""Mesh sizes, slices and refused combinations."""

import jax
import numpy as np
import pytest

from train._mesh import MESH_AXES, MeshConfig, MeshWork, check_mesh, make_mesh, mesh_sizes

WORK = MeshWork(
    num_rows=16,
    num_positions=32,
    gradient_accumulation_steps=2,
    num_heads=4,
    num_experts=8,
    vocab_size=64,
    ffn_sizes=(48,),
    model_size=32,
)


def test_free_axis_takes_the_devices_that_are_left():
    assert mesh_sizes(MeshConfig(data=2, fsdp=-1, tensor=2), 16) == (2, 4, 1, 1, 2)


def test_axes_are_in_order_and_auto():
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, context=2))
    assert mesh.axis_names == MESH_AXES
    assert all(str(kind) == "AxisType.Auto" or kind.name == "Auto" for kind in mesh.axis_types)


@pytest.mark.parametrize(
    ("config", "count", "message"),
    [
        (MeshConfig(data=3, fsdp=-1), 8, "multiply to 3, which does not divide 8 devices"),
        (MeshConfig(data=2, fsdp=2), 8, "needs 4 devices, got 8"),
        (MeshConfig(data=3, fsdp=1, num_slices=2), 3, "num_slices=2 must divide mesh axis data, got 3"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_the_numbers(config, count, message):
    with pytest.raises(ValueError, match=message):
        mesh_sizes(config, count)


@pytest.mark.parametrize("sizes", [{"data": 0}, {"fsdp": -2}, {"data": -1, "fsdp": -1}, {"num_slices": 0}])
def test_impossible_configs_are_refused(sizes):
    with pytest.raises(ValueError, match="must be|at most one"):
        MeshConfig(**sizes)


def test_slices_are_consecutive_along_their_axis():
    devices = jax.devices()[:8]
    mesh = make_mesh(MeshConfig(data=2, fsdp=4, num_slices=2), devices=devices)
    first, second = (set(block.flat) for block in np.split(mesh.devices, 2, axis=0))
    assert first == set(devices[:4])
    assert second == set(devices[4:])


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"data": 3}, r"16 rows do not divide into 2 micro-steps on 3 row shards"),
        ({"context": 5}, "32 positions do not divide over mesh axis context=5"),
        ({"expert": 3}, "8 experts do not divide over mesh axis expert=3"),
        ({"tensor": 3}, "4 heads do not divide over mesh axis tensor=3"),
        ({"tensor": 5}, "64 vocabulary entries do not divide over mesh axis tensor=5"),
    ],
)
def test_work_that_a_mesh_does_not_divide_is_refused_with_the_numbers(sizes, message):
    config = MeshConfig(**{"fsdp": 1, **sizes})
    mesh = make_mesh(config, devices=jax.devices()[: int(np.prod(config.sizes))])
    with pytest.raises(ValueError, match=message):
        check_mesh(mesh, WORK)


def test_all_broken_rules_are_in_one_message():
    mesh = make_mesh(MeshConfig(fsdp=1, tensor=3), devices=jax.devices()[:3])
    with pytest.raises(ValueError, match="heads.*vocabulary") as error:
        check_mesh(mesh, WORK)
    assert "16 rows" not in str(error.value)


def test_expert_axis_without_experts_is_refused():
    mesh = make_mesh(MeshConfig(fsdp=1, expert=2), devices=jax.devices()[:2])
    dense = MeshWork(**{**vars(WORK), "num_experts": 0})
    with pytest.raises(ValueError, match="no experts"):
        check_mesh(mesh, dense)
