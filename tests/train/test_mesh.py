"""Mesh sizes, slices and refused combinations."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from model import KdaConfig, MoeConfig
from train import _aot_compile
from train._mesh import MESH_AXES, MeshConfig, MeshWork, check_mesh, kernel_problems, make_mesh, mesh_sizes
from train._mesh_work import mesh_work
from train._state import model_partitions

from . import tiny
from .step_cases import mesh_of, tiny_config

WORK = MeshWork(
    num_rows=16,
    num_positions=32,
    gradient_accumulation_steps=2,
    num_heads=4,
    num_kv_heads=2,
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
        ({"tensor": 4}, "2 key/value heads do not divide over mesh axis tensor=4"),
        ({"tensor": 2, "context": 4}, "4 heads do not divide over mesh axes tensor=2 x context=4"),
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


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_positions": 64}, ["32 positions of a device"]),
        ({"fused_ffn_size": 768, "model_size": 384}, ["384 units of the dense ffn", "384 model width"]),
        ({"fused_ffn_size": 0, "num_positions": 1}, []),
    ],
)
def test_work_that_the_tiles_of_fused_swiglu_do_not_divide_is_refused_with_the_numbers(changes, words):
    work = MeshWork(
        **{**vars(WORK), "num_positions": 512, "fused_ffn_size": 512, "model_size": 512, **changes}
    )
    problems = kernel_problems(work, {"data": 1, "fsdp": 2, "expert": 1, "context": 2, "tensor": 2})
    assert [problem for problem in problems if "no multiple of 256" in problem] == problems
    assert len(problems) == len(words)
    assert all(problem.startswith(word) for problem, word in zip(problems, words, strict=True))


def test_work_of_a_mesh_counts_the_heads_of_every_mixer_and_the_width_of_shared_experts(tmp_path):
    """Ahead of time as in training: 4 heads of attention and 6 of KDA are divided by 2 devices at most."""
    model = tiny_config(
        layer_group_size=2,
        kda=KdaConfig(num_heads=6, head_dim=8),
        moe=MoeConfig(
            num_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            num_shared_experts=1,
            shared_expert_intermediate_size=20,
            num_routing_groups=2,
        ),
    )
    work = mesh_work(dataclasses.replace(tiny.tiny_config(tmp_path), model=model))
    assert work.num_heads == 2
    assert work.ffn_sizes == (32, 16, 20)
    assert _aot_compile.mesh_work is mesh_work


@pytest.mark.parametrize(
    ("sizes", "gate", "down"),
    [
        ({"fsdp": 4}, ("fsdp",), ("fsdp",)),
        ({"fsdp": 2, "expert": 2}, (("expert", "fsdp"),), (("expert", "fsdp"),)),
        ({"fsdp": 8}, (None, "fsdp"), (None, None, "fsdp")),
        ({"fsdp": 2, "expert": 4}, ("expert", "fsdp"), ("expert", None, "fsdp")),
    ],
    ids=str,
)
def test_devices_store_whole_experts_where_their_number_divides(sizes, gate, down):
    """12 experts: a device stores some of them on 4 devices, and a part of each on 8."""
    experts = model_partitions(tiny_config(), mesh_of(**sizes)).layers[-1].ffn.experts
    assert experts.up == experts.gate
    for partition, axes in ((experts.gate, gate), (experts.down, down)):
        assert partition == PartitionSpec(None, *axes, *[None] * (3 - len(axes)))
