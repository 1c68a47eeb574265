"""Gathers and sums over devices in stages, as TPUs need them, against those in one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from model import Parallel, _parallel, _parallel_weights, gathered, sum_scattered

NAMES = ("fsdp", "expert")
SIZES = [(8, 1), (2, 4), (4, 2)]


def mesh_and_parallel(sizes: tuple[int, int]) -> tuple[Mesh, Parallel]:
    """8 CPU devices that the model takes for TPUs."""
    mesh = Mesh(np.asarray(jax.devices()[:8]).reshape(sizes), NAMES, axis_types=(AxisType.Auto,) * 2)
    return mesh, Parallel(
        fsdp_axes=("fsdp",), expert_axis="expert", sizes=tuple(zip(NAMES, sizes)), platform="tpu"
    )


def on_devices(body, sizes, in_spec, out_spec):
    """`body(x, parallel)` on 8 devices, and its program before compilation."""
    mesh, parallel = mesh_and_parallel(sizes)
    return jax.jit(
        jax.shard_map(
            lambda x: body(x, parallel), mesh=mesh, in_specs=in_spec, out_specs=out_spec, check_vma=False
        )
    )


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(-9, 9, shape).astype(np.float32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("axis", [0, 1])
def test_every_device_has_its_cut_of_the_sum(sizes, axis, dtype):
    """Exactly: bfloat16 holds each part, but few of their sums. It travels as it is, and is added up once."""
    parts = jnp.asarray(28 * draw(8, 16, 24), dtype)
    out = PartitionSpec(*[None] * axis, NAMES)
    summed = on_devices(
        lambda x, parallel: sum_scattered(x[0], axis, NAMES, "float32", parallel),
        sizes,
        PartitionSpec(NAMES),
        out,
    )
    np.testing.assert_array_equal(summed(parts), np.asarray(parts, np.float64).sum(axis=0))
    program, is_narrow = summed.lower(parts).as_text(), dtype == "bfloat16"
    assert program.count("stablehlo.all_to_all") == is_narrow
    assert ("stablehlo.reduce_scatter" in program) != is_narrow


@pytest.mark.parametrize("axis", [0, 1])
def test_sums_of_an_axis_as_long_as_a_vocabulary_keep_its_length(axis):
    length = 2**15 + 8 * 307  # no multiple of what it is padded to
    parts = draw(8, *((8, length) if axis == 0 else (length, 8)))
    out = PartitionSpec(*[None] * axis, NAMES)
    summed = on_devices(
        lambda x, parallel: sum_scattered(x[0], axis, NAMES, "float32", parallel),
        (8, 1),
        PartitionSpec(NAMES),
        out,
    )
    np.testing.assert_array_equal(summed(jnp.asarray(parts)), parts.sum(axis=0))
    assert "stablehlo.pad" in summed.lower(jnp.asarray(parts)).as_text()


@pytest.fixture
def small_gathers(monkeypatch):
    """Gathers over 8 devices go in stages, as those over 64 do."""
    monkeypatch.setattr(_parallel, "MAX_GATHER", 4)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("axis", [0, 1])
def test_gathers_in_stages_put_every_cut_in_its_place(sizes, axis, small_gathers):
    weight = draw(16, 24)
    cut = PartitionSpec(*[None] * axis, NAMES)
    # Every device says what it has.
    everywhere = on_devices(
        lambda x, parallel: gathered(x, axis, NAMES, parallel)[None], sizes, cut, PartitionSpec(NAMES)
    )
    np.testing.assert_array_equal(everywhere(jnp.asarray(weight)), np.broadcast_to(weight, (8, 16, 24)))


def num_stages() -> tuple[int, int]:
    """Gathers and sums of a program that gathers over 8 devices and sums back."""

    def there_and_back(x, parallel):
        return sum_scattered(gathered(x, 0, ("fsdp",), parallel), 0, ("fsdp",), "float32", parallel)

    cut = PartitionSpec("fsdp")
    program = on_devices(there_and_back, (8, 1), cut, cut).lower(jnp.asarray(draw(16, 24))).as_text()
    return program.count("stablehlo.all_gather"), program.count("stablehlo.reduce_scatter")


def test_a_gather_over_more_devices_than_the_compiler_keeps_goes_in_stages(small_gathers):
    assert num_stages() == (2, 2)


def test_a_gather_that_the_compiler_keeps_goes_in_one():
    assert num_stages() == (1, 2)


@pytest.mark.parametrize(
    ("size", "limit", "factors"),
    [(1, 4, (1,)), (4, 4, (4,)), (64, 4, (4, 4, 4)), (64, 32, (32, 2)), (24, 4, (4, 3, 2)), (7, 4, (7,))],
)
def test_stages_are_as_few_and_large_as_allowed(size, limit, factors):
    assert _parallel._factors(size, limit) == factors


def test_cuts_are_rounded_to_bfloat16_as_a_cast_does():
    """As integers, for TPUs: ties, both infinities, NaN, zeros of both signs, numbers too small for a normal one."""
    edges = [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, np.inf, -np.inf, np.nan, 0.0, -0.0, 3.4e38, 1e-40]
    numbers = np.concatenate([np.random.default_rng(0).normal(size=4096), edges]).astype(np.float32)
    rounded = _parallel_weights._cast_cut(jnp.asarray(numbers), "bfloat16", Parallel(platform="tpu"))
    assert rounded.dtype == jnp.bfloat16
    assert np.array_equal(
        np.asarray(rounded, np.float32), numbers.astype(jnp.bfloat16).astype(np.float32), equal_nan=True
    )
