"""What must hold for a model of every family, checked in float64 with one compiled function a family."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from . import samples

ROW = 13
RTOL = 1e-9  # float64, sums of at most a few hundred terms, exponentials of numbers below 40
DOCUMENTS = [[5, 6], [1, 9, 3]]


@functools.cache
def _run():
    """One function for all tests: outputs, and the model gradient of their sums with probes."""

    def objective(model, tokens, segment_ids, positions, probe, mtp_probe):
        out = model(tokens, segment_ids=segment_ids, positions=positions, router_mask=segment_ids > 0)
        return jnp.sum(out.hidden * probe) + jnp.sum(out.mtp_hidden * mtp_probe), out

    return eqx.filter_jit(jax.grad(objective, has_aux=True))


@pytest.fixture(params=list(samples.FAMILIES))
def model(request, x64):
    return samples.make(samples.FAMILIES[request.param], dtype="float64")


def _probes(model, segment_ids, seed=0):
    width, depths = model.config.hidden_size, model.config.num_mtp_layers
    rng = np.random.default_rng(seed)
    real = np.asarray(segment_ids > 0)[..., None]
    probe = rng.normal(size=(2, ROW, width)) * real
    return jnp.asarray(probe), jnp.asarray(rng.normal(size=(depths, 2, ROW, width)) * real)


def _distinct_tokens():
    """Every position has a token of its own, so a row of the embedding's gradient is a position's gradient."""
    return jnp.arange(2 * ROW, dtype=jnp.int32).reshape(2, ROW)


@pytest.mark.slow
def test_earlier_and_foreign_positions_get_no_gradient_from_a_position(model):
    segment_ids, positions = samples.packed(DOCUMENTS, ROW)
    probe, mtp_probe = _probes(model, segment_ids)
    if model.config.tie_word_embeddings:
        assert model.head is None
    ids = np.asarray(segment_ids)
    for row, position in [(0, 3), (0, 7), (1, 0), (1, 9), (1, 12)]:
        only = jnp.zeros_like(probe).at[row, position].set(probe[row, position])
        grad, _ = _run()(model, _distinct_tokens(), segment_ids, positions, only, 0 * mtp_probe)
        per_position = np.asarray(grad.embed)[: 2 * ROW].reshape(2, ROW, -1)
        seen = np.zeros((2, ROW), bool)
        seen[row, : position + 1] = ids[row, : position + 1] == ids[row, position]
        assert (per_position[~seen] == 0).all()
        assert (np.abs(per_position[seen]).max(-1) > 0).all()


@pytest.mark.slow
def test_mtp_depth_k_sees_tokens_of_its_document_up_to_k_ahead(model):
    if model.config.mtp is None:
        pytest.skip("the family's sample has no MTP")
    segment_ids, positions = samples.packed(DOCUMENTS, ROW)
    probe, mtp_probe = _probes(model, segment_ids)
    ids = np.asarray(segment_ids)
    for depth in (1, 2):
        for row, position in [(0, 1), (0, 4), (1, 5), (1, 8)]:
            only = (
                jnp.zeros_like(mtp_probe)
                .at[depth - 1, row, position]
                .set(mtp_probe[depth - 1, row, position])
            )
            grad, _ = _run()(model, _distinct_tokens(), segment_ids, positions, 0 * probe, only)
            per_position = np.array(grad.embed)[: 2 * ROW].reshape(2, ROW, -1)
            per_position[0, 0] = 0  # the embedding of token 0 fills the slots past a document's end
            seen = np.zeros((2, ROW), bool)
            seen[row, : position + depth + 1] = ids[row, : position + depth + 1] == ids[row, position]
            assert (per_position[~seen] == 0).all()
            assert seen[row, min(position + depth, ROW - 1)] == (
                np.abs(per_position[row, position + depth]).max() > 0
            )


@pytest.mark.slow
def test_packed_documents_equal_documents_alone(model):
    """Values of every position, gradients of every parameter, router counts and score sums."""
    segment_ids, positions = samples.packed(DOCUMENTS, ROW)
    tokens = samples.random_tokens((2, ROW))
    probe, mtp_probe = _probes(model, segment_ids)
    packed_grad, packed_out = _run()(model, tokens, segment_ids, positions, probe, mtp_probe)
    alone_grad = jax.tree.map(jnp.zeros_like, packed_grad)
    counts = score_sums = 0
    places = [(r, s, n) for r, row in enumerate(DOCUMENTS) for s, n in zip(np.cumsum([0, *row]), row)]
    for r, start, n in places:
        ids, pos = samples.packed([[n], [0]], ROW)

        def cut(x, axis, r=r, start=start, n=n):
            moved = np.moveaxis(np.zeros_like(x), axis, 0)
            moved[0, ..., :n, :] = np.moveaxis(np.asarray(x), axis, 0)[r, ..., start : start + n, :]
            return jnp.asarray(np.moveaxis(moved, 0, axis))

        alone = cut(tokens[..., None], 0)[..., 0]
        grad, out = _run()(model, alone, ids, pos, cut(probe, 0), cut(mtp_probe, 1))
        np.testing.assert_allclose(
            out.hidden[0, :n], packed_out.hidden[r, start : start + n], rtol=RTOL, atol=RTOL
        )
        np.testing.assert_allclose(
            out.mtp_hidden[:, 0, :n], packed_out.mtp_hidden[:, r, start : start + n], rtol=RTOL, atol=RTOL
        )
        alone_grad = jax.tree.map(jnp.add, alone_grad, grad)
        if out.router is not None:
            counts, score_sums = counts + out.router.counts.sum(1), score_sums + out.router.score_sums.sum(1)
    for packed, alone in zip(jax.tree.leaves(packed_grad), jax.tree.leaves(alone_grad), strict=True):
        np.testing.assert_allclose(alone, packed, rtol=1e-7, atol=RTOL * float(jnp.abs(packed).max() + 1))
    if packed_out.router is not None:
        np.testing.assert_array_equal(counts, packed_out.router.counts.sum(1))
        np.testing.assert_allclose(score_sums, packed_out.router.score_sums.sum(1), rtol=RTOL)


@pytest.mark.slow
def test_gradient_agrees_with_finite_differences(model):
    segment_ids, positions = samples.packed(DOCUMENTS, ROW)
    tokens = samples.random_tokens((2, ROW))
    probe, mtp_probe = _probes(model, segment_ids)
    grad, _ = _run()(model, tokens, segment_ids, positions, probe, mtp_probe)
    rng = np.random.default_rng(1)
    direction = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape)), model)
    # The bias moves experts in and out by steps; it has no derivative.
    direction = _without_router_bias(direction)
    step = 1e-8

    def value(sign):
        moved = jax.tree.map(lambda x, d: x + sign * step * d, model, direction)
        _, out = _run()(moved, tokens, segment_ids, positions, probe, mtp_probe)
        return float(jnp.sum(out.hidden * probe) + jnp.sum(out.mtp_hidden * mtp_probe))

    expected = (value(1) - value(-1)) / (2 * step)
    actual = sum(
        float(jnp.sum(g * d)) for g, d in zip(jax.tree.leaves(grad), jax.tree.leaves(direction), strict=True)
    )
    assert actual == pytest.approx(expected, rel=1e-6)  # rounding of the difference: about 1e-16 / step


def test_router_bias_has_no_gradient(model):
    if model.config.moe is None:
        pytest.skip("the family's sample has no router")
    segment_ids, positions = samples.packed(DOCUMENTS, ROW)
    grad, _ = _run()(
        model, samples.random_tokens((2, ROW)), segment_ids, positions, *_probes(model, segment_ids)
    )
    for path, leaf in jax.tree_util.tree_flatten_with_path(grad)[0]:
        name = path[-1].name
        assert name == "head" or (name == "router_bias") == (not jnp.any(leaf)), jax.tree_util.keystr(path)


def test_padding_does_not_change_real_positions(model):
    segment_ids, positions = samples.packed([[5, 4], [3]], ROW)
    tokens = samples.random_tokens((2, ROW))
    probes = _probes(model, segment_ids)
    grad, out = _run()(model, tokens, segment_ids, positions, *probes)
    other = jnp.where(segment_ids > 0, tokens, (tokens + 7) % 31)
    other_grad, other_out = _run()(model, other, segment_ids, positions, *probes)
    real = np.asarray(segment_ids > 0)
    np.testing.assert_array_equal(np.asarray(out.hidden)[real], np.asarray(other_out.hidden)[real])
    for a, b in zip(jax.tree.leaves(grad), jax.tree.leaves(other_grad), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11)


def _without_router_bias(tree):
    flat, treedef = jax.tree_util.tree_flatten_with_path(tree)
    return jax.tree_util.tree_unflatten(
        treedef, [0 * x if path[-1].name == "router_bias" else x for path, x in flat]
    )
