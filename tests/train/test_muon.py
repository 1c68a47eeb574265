"""Muon against a float64 NumPy version that handles one matrix at a time."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from train._muon import (
    MatrixLayout,
    MuonConfig,
    newton_schulz,
    orthogonal_update,
    orthogonal_updates,
    scale_by_muon,
)

from .step_cases import mesh_of

RTOL = 2e-5  # float32, five iterations of a quintic polynomial
CONFIG = MuonConfig()


def oracle_matrix(matrix: np.ndarray) -> np.ndarray:
    """0.2 * sqrt(max(rows, columns)) times five quintic iterations, transposed when tall."""
    x = np.asarray(matrix, np.float64)
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / (np.linalg.norm(x) + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return 0.2 * np.sqrt(max(matrix.shape)) * (x.T if tall else x)


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def test_per_expert_matrices_of_a_stack_are_independent():
    weights = draw(2, 3, 8, 5)
    got = orthogonal_update(jnp.asarray(weights), MatrixLayout((0, 1), (2,), (3,)), CONFIG)
    want = [[oracle_matrix(weights[i, j]) for j in range(3)] for i in range(2)]
    np.testing.assert_allclose(got, want, rtol=RTOL, atol=RTOL)


def test_per_head_matrices():
    weights = draw(8, 3, 5)  # D H K
    got = orthogonal_update(jnp.asarray(weights), MatrixLayout((1,), (0,), (2,)), CONFIG)
    want = np.stack([oracle_matrix(weights[:, h]) for h in range(3)], axis=1)
    np.testing.assert_allclose(got, want, rtol=RTOL, atol=RTOL)


def test_heads_merged_in_the_input_are_one_matrix():
    weights = draw(3, 4, 7)  # H U D
    got = orthogonal_update(jnp.asarray(weights), MatrixLayout((), (0, 1), (2,)), CONFIG)
    np.testing.assert_allclose(
        got, oracle_matrix(weights.reshape(12, 7)).reshape(3, 4, 7), rtol=RTOL, atol=RTOL
    )


def test_many_matrices_in_bounded_calls_equal_one_by_one():
    weights = draw(37, 4, 6)
    got = orthogonal_update(jnp.asarray(weights), MatrixLayout((0,), (1,), (2,)), CONFIG)
    np.testing.assert_allclose(got, [oracle_matrix(w) for w in weights], rtol=RTOL, atol=RTOL)


def test_zero_matrix_stays_zero():
    assert not np.any(newton_schulz(jnp.zeros((1, 3, 4)), CONFIG))


def test_momentum_is_sgd_nesterov_without_average_or_bias_correction():
    layouts = {"w": MatrixLayout((), (0,), (1,))}
    transform = scale_by_muon(CONFIG, layouts)
    grads = [draw(4, 6), draw(6, 4).T]
    state = transform.init({"w": jnp.zeros((4, 6))})
    buffer = np.zeros((4, 6))
    for grad in grads:
        got, state = transform.update({"w": jnp.asarray(grad)}, state)
        buffer = 0.95 * buffer + grad
        np.testing.assert_allclose(got["w"], oracle_matrix(grad + 0.95 * buffer), rtol=RTOL, atol=RTOL)
    np.testing.assert_allclose(state.momentum["w"], buffer, atol=4e-7)  # two float32 sums of values up to 4


@pytest.mark.parametrize("num_matrices", [1, 3, 8])
def test_matrices_cut_over_devices_equal_whole_ones_without_gathering(num_matrices):
    mesh = mesh_of(data=2, fsdp=2, tensor=2)
    sharding = NamedSharding(mesh, PartitionSpec(None, ("fsdp", "data"), "tensor"))
    weights = draw(num_matrices, 8, 6)
    layout = MatrixLayout((0,), (1,), (2,))
    update = jax.jit(lambda w: orthogonal_updates([w], [layout], CONFIG, [sharding])[0])
    placed = jax.device_put(weights, sharding)
    np.testing.assert_allclose(update(placed), [oracle_matrix(w) for w in weights], rtol=RTOL, atol=RTOL)
    program = update.lower(placed).compile().as_text()
    assert "all-to-all" in program
    assert "all-gather" not in program


def test_alike_matrices_of_several_parameters_travel_together():
    mesh = mesh_of(data=2, fsdp=4)
    shapes = [(3, 8, 6), (8, 5, 6), (8, 6), (8, 4)]
    layouts = [
        MatrixLayout((0,), (1,), (2,)),
        MatrixLayout((1,), (0,), (2,)),
        *[MatrixLayout((), (0,), (1,))] * 2,
    ]
    specs = [PartitionSpec(None, "fsdp"), PartitionSpec("fsdp"), PartitionSpec("fsdp"), PartitionSpec("fsdp")]
    shardings = [NamedSharding(mesh, spec) for spec in specs]
    update = jax.jit(lambda w: orthogonal_updates(w, layouts, CONFIG, shardings))
    weights = [draw(*shape) for shape in shapes]
    placed = [jax.device_put(w, s) for w, s in zip(weights, shardings)]
    got = update(placed)
    np.testing.assert_allclose(got[0], [oracle_matrix(w) for w in weights[0]], rtol=RTOL, atol=RTOL)
    by_head = [oracle_matrix(weights[1][:, h]) for h in range(5)]
    np.testing.assert_allclose(got[1], np.stack(by_head, axis=1), rtol=RTOL, atol=RTOL)
    np.testing.assert_allclose(got[2], oracle_matrix(weights[2]), rtol=RTOL, atol=RTOL)
    np.testing.assert_allclose(got[3], oracle_matrix(weights[3]), rtol=RTOL, atol=RTOL)
    program = update.lower(placed).compile().as_text()
    # There and back, for matrices of 8 x 6 and of 8 x 4.
    assert len(re.findall(r" all-to-all\(", program)) == 4


def test_bfloat16_iterations_stay_near_float32():
    weights = jnp.asarray(draw(1, 16, 24))
    rough = newton_schulz(weights, MuonConfig(bfloat16_iterations=True))
    error = np.asarray(rough - newton_schulz(weights, CONFIG))
    scale = np.sqrt(np.mean(np.asarray(rough) ** 2))
    assert np.sqrt(np.mean(error**2)) < 15 * 2.0**-8 * scale  # three roundings to 8 bits in each of 5 steps
    assert np.any(error)


def test_a_layout_must_name_every_axis_once():
    with pytest.raises(ValueError, match="every axis once"):
        MatrixLayout((0,), (0,), (1,))
