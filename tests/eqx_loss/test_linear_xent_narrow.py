"""Narrow forms of the fused output layer, as on a TPU: scores kept in 16 bits, sums held in 24."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import eqx_loss
from eqx_loss import XentExecution, XentRules, XentSharding, XentTiling, _linear_xent_narrow
from tests.oracles import xent as oracle

ROWS, LENGTH, WIDTH, VOCAB, CLASSES = 3, 7, 6, 37, 33
TILING = XentTiling(token_tile_size=8, vocab_tile_size=16)  # both ragged
ON_TPU = XentExecution(backend="tpu", tiling=TILING)
EVERYTHING = XentRules(z_loss_multiplier=0.1, label_smoothing=0.1, vocab_size=CLASSES)
CAPPED = XentRules(z_loss_multiplier=0.1, logit_soft_cap=2.0, label_smoothing=0.1, vocab_size=CLASSES)
HALF_STEP = 2.0**-8 / 254  # of the power of two below a number
FLOAT32 = 1e-6  # losses: scores, exponentials and sums of 37 terms in float32
# Root mean square of the error over that of a gradient: slope and result are rounded to bfloat16, each by
# 2^-9 / sqrt(3) = 1.1e-3 to 2^-8 / sqrt(3). Measured up to 2.96e-3; few numbers, so they scatter.
GRADIENT = 3.5e-3


def _rel_rms(found, expected):
    found = np.asarray(jnp.asarray(found).astype(jnp.float32), np.float64)
    return np.sqrt(np.mean((found - expected) ** 2) / np.mean(np.square(expected)))


def _case(seed=0, scale=1.0):
    rng = np.random.default_rng(seed)
    hidden = jnp.asarray(scale * rng.normal(size=(ROWS, LENGTH, WIDTH)), jnp.bfloat16)
    unembed = jnp.asarray(rng.normal(size=(WIDTH, VOCAB)), jnp.bfloat16)
    mask = rng.random((ROWS, LENGTH)) < 0.7
    mask[0, 0] = True
    weights = np.asarray(rng.random((ROWS, LENGTH)) * mask, np.float32)
    return hidden, unembed, rng.integers(0, CLASSES, (ROWS, LENGTH)), mask, weights


def _program(rules, execution=ON_TPU):
    def objective(hidden, unembed, targets, mask, weights, factors):
        loss = eqx_loss.linear_cross_entropy(
            hidden, unembed, targets, weights, mask=mask, rules=rules, execution=execution
        )
        return factors[0] * loss.objective + factors[1] * loss.z_objective, loss

    return jax.jit(jax.value_and_grad(objective, (0, 1), has_aux=True))


def _expected(case, rules, z=None):
    hidden, unembed, *rest = case
    return oracle.head(
        *(np.asarray(part.astype(jnp.float32)) for part in (hidden, unembed)),
        *rest,
        z=rules.z_loss_multiplier if z is None else z,
        cap=rules.logit_soft_cap,
        smoothing=rules.label_smoothing,
        classes=rules.vocab_size,
    )


def _assert_near(found, expected, factor=1.0):
    (_, loss), (d_hidden, d_unembed) = found
    for name in ("objective", "z_objective", "xent", "z_term"):
        np.testing.assert_allclose(getattr(loss, name), expected[name], rtol=FLOAT32, atol=FLOAT32)
    errors = [
        _rel_rms(slope, factor * expected[name])
        for slope, name in ((d_hidden, "d_hidden"), (d_unembed, "d_unembed"))
    ]
    assert max(errors) <= GRADIENT, errors


@pytest.mark.parametrize("rules", [EVERYTHING, CAPPED], ids=["narrow", "soft_cap"])
def test_values_and_gradients_are_within_the_measured_bound(rules):
    """Then with two cotangents, by recomputed scores: 0.5 (xent + z) + 1.5 z has 4 z in units of 0.5."""
    program = _program(rules)
    for seed in range(3):
        case = _case(seed)
        _assert_near(program(*case, (1.0, 1.0)), _expected(case, rules))
        found, gradients = program(*case, (0.5, 2.0))
        _assert_near((found, gradients), _expected(case, rules) | _slopes(_expected(case, rules, z=0.4)), 0.5)


def _slopes(expected):
    return {name: expected[name] for name in ("d_hidden", "d_unembed")}


def test_extreme_scores():
    """All equal; spread over more than the 32 nats that are kept; near 1e4, where float32 steps are 1e-3.

    Slopes are rounded to bfloat16 and may cancel in a sum, so float32 scores and sums set the bound.
    """
    narrow, wide = (
        _program(EVERYTHING, XentExecution(backend=name, tiling=TILING)) for name in ("tpu", "gpu")
    )
    for hidden, unembed in _extremes():
        case = (hidden, unembed, *_case()[2:])
        expected = _expected(case, EVERYTHING)
        (_, loss), slopes = narrow(*case, (1.0, 1.0))
        np.testing.assert_allclose(loss.xent, expected["xent"], rtol=FLOAT32, atol=FLOAT32)
        for name, ours, theirs in zip(("d_hidden", "d_unembed"), slopes, wide(*case, (1.0, 1.0))[1]):
            assert _rel_rms(ours, expected[name]) <= 1.05 * _rel_rms(theirs, expected[name]) + 2.0**-12


def _extremes():
    hidden, unembed, *_ = _case()
    equal = jnp.broadcast_to(unembed[:, :1], unembed.shape)
    # Small integers times powers of two: products and sums are exact in float32.
    whole = jnp.round(2 * hidden), jnp.round(2 * unembed)
    return [(hidden, equal), (16 * whole[0], whole[1]), (1024 * whole[0], whole[1])]


def test_a_sure_prediction_keeps_its_small_gradient():
    """`p - 1` near -5e-4: an error of half a step in p would be half of it."""
    case = list(_case())
    case[1] = (
        jnp.zeros((WIDTH, VOCAB), jnp.bfloat16)
        .at[0, :CLASSES]
        .set(jnp.linspace(-1, 0, CLASSES, dtype=jnp.bfloat16))
    )
    case[1] = case[1].at[0, 5].set(1.0)
    case[0] = jnp.ones_like(case[0]).at[..., 0].set(8.0)
    case[2] = np.full((ROWS, LENGTH), 5)
    rules = XentRules(vocab_size=CLASSES)
    _, (d_hidden, _) = _program(rules)(*case, (1.0, 1.0))
    expected = _expected(case, rules)["d_hidden"]
    assert 0 < np.abs(expected).max() < 1e-2
    assert _rel_rms(d_hidden, expected) <= GRADIENT


def test_narrow_forms_add_less_than_a_hundredth_to_the_error():
    """The same operands with scores and sums in float32 (the form of a GPU); 64 token tiles."""
    tiling = XentTiling(token_tile_size=8, vocab_tile_size=500)
    rules = XentRules()
    narrow, wide = (_program(rules, XentExecution(backend=name, tiling=tiling)) for name in ("tpu", "gpu"))
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(1, 512, 32)), jnp.bfloat16)
    unembed = jnp.asarray(rng.normal(size=(32, 1900)) / 2, jnp.bfloat16)
    targets, mask = rng.integers(0, 1900, (1, 512)), np.ones((1, 512), bool)
    case = (hidden, unembed, targets, mask, np.full((1, 512), 1 / 512, np.float32))
    exact = (np.asarray(part.astype(jnp.float32)) for part in (hidden[0], unembed))
    _, *expected = oracle.dense(*exact, targets[0], case[4][0])
    errors = [
        [_rel_rms(a, b) for a, b in zip((slopes[0][0], slopes[1]), expected)]
        for slopes in (program(*case, (1.0, 1.0))[1] for program in (narrow, wide))
    ]
    assert (np.array(errors[0]) <= 1.01 * np.array(errors[1])).all(), errors


def test_token_cotangents_in_narrow_form():
    case = _case()
    hidden, unembed, targets, mask, weights = (jnp.asarray(part) for part in case)

    def objective(hidden, unembed):
        losses = eqx_loss.linear_token_cross_entropy(hidden, unembed, targets, mask, execution=ON_TPU)
        return jnp.sum(weights * losses.xent)

    found = jax.jit(jax.grad(objective, (0, 1)))(hidden, unembed)
    expected = _expected(case, XentRules())
    errors = [_rel_rms(a, expected[name]) for a, name in zip(found, ("d_hidden", "d_unembed"))]
    assert max(errors) <= GRADIENT, errors


def test_narrow_scores_over_vocabulary_shards():
    """Shards have peaks of their own; sums stay float32 on a mesh."""
    case = list(_case())
    case[1] = jnp.pad(case[1], ((0, 0), (0, 3)))
    mesh = Mesh(np.array(jax.devices()[:2]), ("tensor",))
    sharding = XentSharding(mesh=mesh, vocab=("tensor",), unembed=PartitionSpec(None, "tensor"))
    execution = XentExecution(backend="tpu", tiling=TILING, sharding=sharding)
    plan = eqx_loss.explain_linear_cross_entropy(case[0], case[1], rules=EVERYTHING, execution=execution)
    assert plan.vocab_cut.narrow_scores
    assert not plan.vocab_cut.split_unembed
    _assert_near(_program(EVERYTHING, execution)(*case, (1.0, 1.0)), _expected(case, EVERYTHING))


def test_a_split_sum_is_within_half_a_step():
    rng = np.random.default_rng(0)
    numbers = np.float32(rng.choice([-1, 1], 4000) * 2 ** rng.uniform(-90, 126, 4000))
    edges = [0.0, 1.0, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 2 - 2.0**-23, 2 - 2.0**-9, -(1 + 2.0**-8)]
    numbers = np.concatenate([numbers, np.array(edges, np.float32)])
    split = jax.jit(_linear_xent_narrow.split_sum)(numbers)
    assert (split.nearest == jnp.asarray(numbers).astype(jnp.bfloat16)).all()
    back = np.asarray(jax.jit(_linear_xent_narrow.whole_sum)(split), np.float64)
    # One float32 rounding more, when the parts are joined.
    assert (np.abs(back - numbers) <= (HALF_STEP + 2.0**-23) * np.abs(numbers)).all()
    again = jax.jit(_linear_xent_narrow.split_sum)(back.astype(np.float32))
    assert (np.asarray(_linear_xent_narrow.whole_sum(again)) == back).all()


def test_a_split_sum_keeps_what_is_not_finite():
    numbers = jnp.array([jnp.inf, -jnp.inf, jnp.nan])
    back = _linear_xent_narrow.whole_sum(_linear_xent_narrow.split_sum(numbers))
    np.testing.assert_array_equal(back, numbers)


def test_parts_smaller_than_a_bfloat16_can_hold_are_summed():
    """1000 parts of 1/1000 of the first: in bfloat16 every one of them would be lost."""
    parts = np.full((1000, 4, 8), 2.0**-10, np.float32)

    @jax.jit
    def total(parts):
        start = _linear_xent_narrow.split_sum(jnp.ones((4, 16)))

        def add(total, part):
            return _linear_xent_narrow.add_to_columns(total, part, jnp.int32(3)), None

        return jax.lax.scan(add, start, parts)[0]

    found = np.asarray(_linear_xent_narrow.whole_sum(total(parts)))
    assert (found[:, :3] == 1).all()
    assert (found[:, 11:] == 1).all()
    # Not a loose tolerance: 1000 additions, each of which loses at most half a step of a number below 2.
    np.testing.assert_allclose(found[:, 3:11], 1 + 1000 * 2.0**-10, atol=1000 * HALF_STEP)


@pytest.mark.parametrize("shape", [(1, 3, 5, 7), (128, 9)], ids=["odd", "slices"])
@pytest.mark.parametrize("factor", [1.0, -0.3])
def test_the_result_is_the_scaled_sum_rounded_once(shape, factor):
    rng = np.random.default_rng(0)
    total = _linear_xent_narrow.split_sum(jnp.asarray(rng.normal(size=shape), jnp.float32))
    factor = jnp.float32(factor)
    found = _linear_xent_narrow.scaled_sum(total, factor, jnp.dtype("bfloat16"))
    assert (found == (factor * _linear_xent_narrow.whole_sum(total)).astype(jnp.bfloat16)).all()
    assert found.shape == shape


def test_kept_shares_are_within_half_a_step_of_a_score():
    rng = np.random.default_rng(0)
    for offset in (0.0, 1e4, -1e4):
        scores = jnp.asarray(np.sort(rng.uniform(-60, 0, (1, 3, 500))) + offset, jnp.float32)
        peak = jnp.max(scores, -1)
        kept = _linear_xent_narrow.no_scores((2, 1, 3, 500), jnp.dtype("float32"), narrow=True)
        kept = _linear_xent_narrow.keep_scores(kept, scores, peak, jnp.int32(1))
        # The largest score of the row may be in another tile.
        found = _linear_xent_narrow.narrow_shares(kept.scores[1], kept.peaks[1], peak + 2)
        below = np.asarray(scores, np.float64) - np.asarray(peak + 2, np.float64)[..., None]
        near = below > -33
        exact = np.exp(below)
        assert (np.abs(found - exact)[near] <= 2.5e-4 * exact[near]).all()
        assert (np.asarray(found)[below < -34.001] == 0).all()
        assert (np.asarray(found)[..., -1] == np.exp(np.float32(-2))).all()
