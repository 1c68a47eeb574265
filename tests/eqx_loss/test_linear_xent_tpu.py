"""Fused output layer for TPU, on a host without one: programs compiled ahead of time, kernels interpreted."""

import importlib.util
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import eqx_loss
from eqx_loss import XentExecution, XentSharding
from tests.oracles import xent as oracle

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed (extra `tpu`)"
    ),
]
needs_tokamax = pytest.mark.skipif(
    importlib.util.find_spec("tokamax") is None,
    reason="tokamax is not installed (extra `bench`, Python 3.12 or later)",
)
TOKENS, WIDTH, VOCAB = 8192, 2048, 157_184
# Temporaries and results of tokamax 0.0.17's kernel at these sizes, from `python -m bench.xent --only tpu`.
MOSAIC_BYTES = {"v5p:2x2x1": 1.489e9, "v6e:2x2": 1.355e9}
KERNEL_ATOL = 1e-5  # float32 sums of 2000 terms in two orders; measured 4e-6


def _devices(monkeypatch, topology):
    from jax.experimental import topologies

    for name, value in (
        ("TPU_SKIP_MDS_QUERY", "1"),
        ("TPU_WORKER_HOSTNAMES", "localhost"),
        ("TPU_ACCELERATOR_TYPE", "v5p-8"),
        ("ALLOW_MULTIPLE_LIBTPU_LOAD", "1"),
    ):
        monkeypatch.setenv(name, os.environ.get(name, value))
    return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices


def _lower(mesh, specs, execution):
    """Loss and gradients of bfloat16 arguments; specs: of hidden, unembed and per-token arrays."""
    shapes = [
        ((1, TOKENS, WIDTH), jnp.bfloat16, specs[0]),
        ((WIDTH, VOCAB), jnp.bfloat16, specs[1]),
        ((1, TOKENS), jnp.int32, specs[2]),
        ((1, TOKENS), jnp.float32, specs[2]),
    ]
    arguments = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for shape, dtype, spec in shapes
    ]

    def objective(hidden, unembed, targets, weights):
        return eqx_loss.linear_cross_entropy(hidden, unembed, targets, weights, execution=execution).objective

    return jax.jit(jax.value_and_grad(objective, (0, 1))).lower(*arguments)


@pytest.mark.parametrize(("topology", "kernel_bytes"), MOSAIC_BYTES.items())
def test_memory_on_one_chip_is_the_narrow_sums_and_scores_and_below_the_kernels(
    monkeypatch, topology, kernel_bytes
):
    mesh = Mesh(np.array(_devices(monkeypatch, topology))[:1], ("data",), axis_types=(AxisType.Auto,))
    execution = XentExecution(backend="tpu")
    shapes = (
        jax.ShapeDtypeStruct((1, TOKENS, WIDTH), jnp.bfloat16),
        jax.ShapeDtypeStruct((WIDTH, VOCAB), jnp.bfloat16),
    )
    plan = eqx_loss.explain_linear_cross_entropy(*shapes, execution=execution)
    memory = _lower(mesh, (PartitionSpec(),) * 3, execution).compile().memory_analysis()
    total = memory.temp_size_in_bytes + memory.output_size_in_bytes
    # Three bytes a number of both gradients, results included, and two a score: a float32 copy of the gradient
    # of unembed would be 1.3 GB more, a bfloat16 result beside the sum 0.6 GB.
    assert (plan.gradient_bytes, plan.logits_bytes) == (3 * WIDTH * VOCAB, 2 * 1024 * 157_440)
    assert total <= 1.03 * (plan.gradient_bytes + plan.logits_bytes + 3 * TOKENS * WIDTH)
    assert total < kernel_bytes


def test_a_mesh_of_four_chips_compiles(monkeypatch):
    devices = np.array(_devices(monkeypatch, "v5p:2x2x1")).reshape(2, 2)
    mesh = Mesh(devices, ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
    unembed = PartitionSpec("fsdp", "tensor")
    sharding = XentSharding(mesh=mesh, positions=("fsdp",), vocab=("tensor",), unembed=unembed)
    per_token = PartitionSpec(None, "fsdp")
    lowered = _lower(mesh, (per_token, unembed, per_token), XentExecution(sharding=sharding))
    memory = lowered.compile().memory_analysis()
    assert (
        memory.temp_size_in_bytes < 4 * WIDTH * VOCAB
    )  # half the columns: half the gradient, and the logits


@needs_tokamax
def test_the_tpu_kernel_equals_the_oracle_in_the_interpreter(monkeypatch):
    import tokamax
    from jax.experimental.pallas import tpu as pltpu

    mesh = Mesh(np.array(_devices(monkeypatch, "v5p:2x2x1"))[:1], ("data",), axis_types=(AxisType.Auto,))
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(2, 300, 128)).astype(
        np.float32
    )  # 600 tokens: no multiple of the kernel's lanes
    unembed = (0.2 * rng.normal(size=(128, 2000))).astype(np.float32)
    targets, mask = rng.integers(0, 2000, (2, 300)), rng.random((2, 300)) < 0.7
    weights = (rng.random((2, 300)) * mask).astype(np.float32)
    flat = (hidden.reshape(600, 128), unembed, targets.ravel(), weights.ravel())
    xent, d_hidden, d_unembed = oracle.dense(*flat)
    poisoned = jnp.asarray(np.where(mask[..., None], hidden, np.nan))
    execution = XentExecution(implementation="tokamax_mosaic_tpu", backend="tpu")

    def objective(hidden, unembed):
        loss = eqx_loss.linear_cross_entropy(
            hidden,
            unembed,
            jnp.asarray(targets),
            jnp.asarray(weights),
            mask=jnp.asarray(mask),
            execution=execution,
        )
        return 2 * loss.objective, loss.xent

    interpreted = pltpu.InterpretParams(out_of_bounds_reads="uninitialized", uninitialized_memory="zero")
    with (
        jax.sharding.use_abstract_mesh(mesh.abstract_mesh),
        tokamax.config.cross_compile(True),
        pltpu.force_tpu_interpret_mode(interpreted),
    ):
        (_, found), gradients = jax.value_and_grad(objective, (0, 1), has_aux=True)(
            poisoned, jnp.asarray(unembed)
        )
    np.testing.assert_allclose(found.ravel(), np.where(mask.ravel(), xent, 0), atol=KERNEL_ATOL)
    np.testing.assert_allclose(gradients[0].reshape(600, 128), 2 * d_hidden, atol=KERNEL_ATOL)
    np.testing.assert_allclose(gradients[1], 2 * d_unembed, atol=KERNEL_ATOL)


@needs_tokamax
def test_tokamax_chunked_xla_is_wrong_where_ours_is_right():
    """V = 157,184 is no multiple of its block of 2048: padded columns enter its log-sum-exp.

    Logits shifted to a mean of -8.6. If this fails because tokamax is right, take it off the refused list.
    """
    import tokamax

    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(64, 64)).astype(np.float32)
    hidden[:, 0] = 1.0
    unembed = (rng.normal(size=(64, VOCAB)) * 0.02).astype(np.float32)
    unembed[0] = -8.6  # shifts every logit, and so no true loss
    targets = rng.integers(0, VOCAB, 64)
    exact, _, _ = oracle.dense(hidden, unembed, targets, np.ones(64))
    arguments = (jnp.asarray(hidden), jnp.asarray(targets), jnp.asarray(unembed))
    chunked = tokamax.linear_softmax_cross_entropy_loss(
        *arguments, reduction="none", implementation="chunked_xla"
    )
    ours = eqx_loss.linear_cross_entropy(
        arguments[0][None], arguments[2], arguments[1][None], jnp.ones((1, 64))
    )
    # float32 near 12 nats, against a fault of 2.97 nats.
    np.testing.assert_allclose(ours.xent[0], exact, atol=1e-4)
    assert float(jnp.mean(chunked)) - exact.mean() > 2.5
