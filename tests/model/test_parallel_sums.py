"""Sums over devices in stages, as TPUs need them, against the sum in one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from model import Parallel, sum_scattered


@pytest.mark.parametrize("sizes", [(8, 1), (2, 4), (4, 2)])
@pytest.mark.parametrize("axis", [0, 1])
def test_stages_leave_every_device_its_cut_of_the_sum(sizes, axis):
    names = ("fsdp", "expert")
    mesh = Mesh(np.asarray(jax.devices()[:8]).reshape(sizes), names, axis_types=(AxisType.Auto,) * 2)
    parts = np.random.default_rng(0).integers(-9, 9, (8, 16, 24)).astype(np.float32)
    parallel = Parallel(
        fsdp_axes=("fsdp",), expert_axis="expert", sizes=tuple(zip(names, sizes)), platform="tpu"
    )
    out = PartitionSpec(*[None] * axis, names)
    summed = jax.shard_map(
        lambda x: sum_scattered(x[0], axis, names, parallel),
        mesh=mesh,
        in_specs=PartitionSpec(names),
        out_specs=out,
        check_vma=False,
    )
    np.testing.assert_array_equal(jax.jit(summed)(jnp.asarray(parts)), parts.sum(axis=0))
