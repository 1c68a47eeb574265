"""Weights of one input that travel as one matrix."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from model import Cut, GqaConfig, Parallel, RopeConfig
from model._gqa import Gqa, init_gqa
from model._joined import Part
from model._parallel_weights import whole
from model._rows import make_rows

NUM_DEVICES, WIDTH, LENGTH, THETA = 4, 8, 6, 100.0
CONFIG = GqaConfig(num_heads=3, num_kv_heads=1, head_dim=4, rope_head_dim=4)
ON_TPUS = Parallel(fsdp_axes=("fsdp",), sizes=(("fsdp", NUM_DEVICES),), platform="tpu")


def layer(**changes) -> Gqa:
    config = dataclasses.replace(CONFIG, **changes)
    return init_gqa(config, RopeConfig(theta=THETA), WIDTH, 0.5, 1e-6, key=jax.random.key(0))


def turned(x: np.ndarray, sign: int) -> np.ndarray:
    """Heads [B S H 4] at positions 0, 1, ..., turned forwards or back."""
    pairs = x[..., :2] + 1j * x[..., 2:]
    pairs = pairs * np.exp(1j * sign * np.arange(LENGTH)[:, None, None] * THETA ** (-np.arange(2) / 2))
    return np.concatenate([pairs.real, pairs.imag], axis=-1)


@pytest.mark.parametrize("is_kept", [False, True], ids=["gradients reduced", "gradients kept"])
def test_queries_keys_and_values_of_joined_weights_equal_the_oracle(is_kept):
    """Every device has a row of its own. Gradients that every device keeps whole are added up here."""
    gqa = layer()
    names = ("q", "k", "v")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(NUM_DEVICES, LENGTH, WIDTH))
    probes = [rng.normal(size=(NUM_DEVICES, LENGTH, getattr(gqa, n).shape[1], 4)) for n in names]
    cut = PartitionSpec("fsdp")
    specs = jax.tree.map(lambda a: PartitionSpec(None, None, "fsdp") if a is gqa.out else cut, gqa)

    def body(gqa, x, probes):
        tokens = jnp.zeros(x.shape[:2], jnp.int32)
        rows = make_rows(tokens, None, jnp.arange(LENGTH)[None], None, None, ON_TPUS)
        stored = {n: getattr(gqa, n) for n in names}

        def run(trained):
            given = [Cut(shard=stored[n], sink=trained[n]) if is_kept else trained[n] for n in names]
            gathered = whole(eqx.tree_at(lambda g: [g.q, g.k, g.v], gqa, given), ON_TPUS)
            assert isinstance(gathered.k, Part)
            return gathered.queries_keys_values(x, rows)

        sinks = {n: jnp.zeros((WIDTH, *stored[n].shape[1:])) for n in names}
        out, pull = jax.vjp(run, sinks if is_kept else stored)
        return out, jax.tree.map(lambda g: g[None] if is_kept else g, pull(tuple(probes))[0])

    mapped = jax.shard_map(
        body,
        mesh=Mesh(np.asarray(jax.devices()[:NUM_DEVICES]), ("fsdp",), axis_types=(AxisType.Auto,)),
        in_specs=(specs, cut, cut),
        out_specs=(cut, cut),
        check_vma=False,
    )
    out, grads = jax.jit(mapped)(
        gqa, jnp.asarray(x, jnp.float32), [jnp.asarray(p, jnp.float32) for p in probes]
    )
    for name, got, probe in zip(names, out, probes, strict=True):
        turns = 0 if name == "v" else 1
        weight = np.asarray(getattr(gqa, name), np.float64)
        want = turned(np.einsum("bsd,dhk->bshk", x, weight), turns)
        np.testing.assert_allclose(got, want, atol=1e-6 * np.abs(want).max())  # float32, 8 terms
        grad = np.sum(grads[name], axis=0) if is_kept else grads[name]
        want = np.einsum("bsd,bshk->dhk", x, turned(probe, -turns))
        np.testing.assert_allclose(grad, want, atol=1e-6 * np.abs(want).max())  # 24 terms


@pytest.mark.parametrize(
    ("changes", "parallel"),
    [
        ({"use_qk_norm": True}, ON_TPUS),
        ({"use_qkv_bias": True}, ON_TPUS),
        ({"rope_head_dim": 2}, ON_TPUS),
        ({}, dataclasses.replace(ON_TPUS, platform="cpu")),
        ({}, dataclasses.replace(ON_TPUS, tensor_axis="tensor")),
        ({}, Parallel(platform="tpu")),
    ],
    ids=["norms", "biases", "heads turned in part", "CPUs", "heads cut", "nothing travels"],
)
def test_weights_whose_heads_would_be_copied_travel_alone(changes, parallel):
    mesh = jax.sharding.AbstractMesh(
        (NUM_DEVICES, 1), ("fsdp", "tensor"), axis_types=(AxisType.Auto, AxisType.Auto)
    )
    gathered = []
    jax.eval_shape(
        jax.shard_map(
            lambda gqa: gathered.append(whole(gqa, parallel)),
            mesh=mesh,
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec(),
            axis_names={"fsdp"},
            check_vma=False,
        ),
        layer(**changes),
    )
    assert not isinstance(gathered[0].q, Part)
