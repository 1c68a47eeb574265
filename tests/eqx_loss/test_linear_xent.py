"""Fused output layer on one device: values, gradients, tilings, cotangents, masks, transformations."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import eqx_loss
from eqx_loss import XentExecution, XentRules, XentTiling
from tests.oracles import xent as oracle

ROWS, LENGTH, WIDTH, VOCAB, CLASSES = 3, 7, 5, 37, 33
EXACT = 1e-12  # float64, sums of at most 37 terms
PLAIN, CHOSEN = XentRules(), XentExecution()
EVERYTHING = XentRules(z_loss_multiplier=0.1, logit_soft_cap=2.0, label_smoothing=0.1, vocab_size=CLASSES)


def _case(seed=0, dtype=np.float64, keep=0.7):
    rng = np.random.default_rng(seed)
    hidden = rng.normal(size=(ROWS, LENGTH, WIDTH)).astype(dtype)
    unembed = rng.normal(size=(WIDTH, VOCAB)).astype(dtype)
    targets = rng.integers(0, CLASSES, (ROWS, LENGTH))
    mask = rng.random((ROWS, LENGTH)) < keep
    mask[0, 0], mask[2, :] = True, False  # one row without a scored token
    weights = (rng.random((ROWS, LENGTH)) * mask).astype(dtype)
    return hidden, unembed, targets, mask, weights


def _tiles(tokens, columns, keep_logits=True):
    tiling = XentTiling(token_tile_size=tokens, vocab_tile_size=columns, keep_logits=keep_logits)
    return XentExecution(tiling=tiling)


def _value_and_grad(case, rules=PLAIN, execution=CHOSEN, factors=(1.0, 1.0)):
    hidden, unembed, targets, mask, weights = (jnp.asarray(part) for part in case)

    def f(hidden, unembed):
        loss = eqx_loss.linear_cross_entropy(
            hidden, unembed, targets, weights, mask=mask, rules=rules, execution=execution
        )
        return factors[0] * loss.objective + factors[1] * loss.z_objective, loss

    (_, loss), gradients = jax.jit(jax.value_and_grad(f, (0, 1), has_aux=True))(hidden, unembed)
    return loss, gradients


def _expected(case, rules):
    hidden, unembed, targets, mask, weights = case
    return oracle.head(
        np.where(mask[..., None], hidden, 0),
        unembed,
        targets,
        mask,
        weights,
        z=rules.z_loss_multiplier,
        cap=rules.logit_soft_cap,
        smoothing=rules.label_smoothing,
        classes=rules.vocab_size,
    )


def _assert_equal(found, expected, tolerance=EXACT):
    loss, (d_hidden, d_unembed) = found
    for name in ("objective", "z_objective", "xent", "z_term"):
        np.testing.assert_allclose(getattr(loss, name), expected[name], rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(d_hidden, expected["d_hidden"], rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(d_unembed, expected["d_unembed"], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "rules",
    [
        XentRules(),
        XentRules(z_loss_multiplier=0.1),
        XentRules(logit_soft_cap=2.0),
        XentRules(label_smoothing=0.1),
        XentRules(vocab_size=CLASSES),
        EVERYTHING,
    ],
    ids=["plain", "z", "soft_cap", "smoothing", "padded", "everything"],
)
def test_values_and_gradients_equal_the_oracle(x64, rules):
    case = _case()
    _assert_equal(_value_and_grad(case, rules, _tiles(8, 16)), _expected(case, rules))


@pytest.mark.parametrize("keep_logits", [True, False], ids=["three_products", "four_products"])
@pytest.mark.parametrize(("tokens", "columns"), [(1, 37), (5, 8), (21, 37), (64, 64)])
def test_no_tiling_changes_the_result(x64, tokens, columns, keep_logits):
    case = _case()
    found = _value_and_grad(case, EVERYTHING, _tiles(tokens, columns, keep_logits))
    _assert_equal(found, _expected(case, EVERYTHING))


def test_chosen_tiling_equals_the_oracle(x64):
    case = _case()
    _assert_equal(_value_and_grad(case, EVERYTHING), _expected(case, EVERYTHING))


def test_forced_plain_path_equals_the_oracle(x64):
    case = _case()
    found = _value_and_grad(case, EVERYTHING, XentExecution(implementation="plain"))
    _assert_equal(found, _expected(case, EVERYTHING))


def test_gradient_is_scaled_by_the_cotangent_of_the_objective(x64):
    case = _case()
    expected = _expected(case, XentRules())
    _, (d_hidden, d_unembed) = _value_and_grad(case, execution=_tiles(8, 16), factors=(-3.0, 5.0))
    np.testing.assert_allclose(d_hidden, -3 * expected["d_hidden"], rtol=EXACT, atol=EXACT)
    np.testing.assert_allclose(d_unembed, -3 * expected["d_unembed"], rtol=EXACT, atol=EXACT)


def test_objective_and_z_objective_may_have_different_cotangents(x64):
    case, rules = _case(), XentRules(z_loss_multiplier=0.1)
    _, found = _value_and_grad(case, rules, _tiles(8, 16), factors=(0.5, 2.0))
    # 0.5 (xent + 0.1 z) + 1.5 (0.1 z) has the coefficient 0.4 in units of 0.5.
    expected = _expected(case, XentRules(z_loss_multiplier=0.4))
    np.testing.assert_allclose(found[0], 0.5 * expected["d_hidden"], rtol=EXACT, atol=EXACT)
    np.testing.assert_allclose(found[1], 0.5 * expected["d_unembed"], rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("factors", [(1.0, 1.0, 1.0), (1.0, 0.3, 0.0)], ids=["common", "different"])
def test_heads_share_one_gradient_of_unembed(x64, factors):
    cases = [_case(seed) for seed in range(3)]
    unembed = cases[0][1]
    z = (0.1, 0.0, 0.2)
    expected = [
        oracle.head(h, unembed, t, m, w, z=multiplier) for (h, _, t, m, w), multiplier in zip(cases, z)
    ]
    hidden, _, targets, mask, weights = (jnp.asarray(np.stack(parts)) for parts in zip(*cases))

    def f(hidden, unembed):
        heads = eqx_loss.linear_cross_entropy_heads(
            hidden,
            unembed,
            targets,
            weights,
            mask=mask,
            rules=XentRules(z_loss_multiplier=z),
            execution=_tiles(8, 16),
        )
        total = sum(factor * (head.objective + head.z_objective) for factor, head in zip(factors, heads))
        return total, heads

    (_, heads), found = jax.jit(jax.value_and_grad(f, (0, 1), has_aux=True))(hidden, jnp.asarray(unembed))
    d_hidden = np.stack([factor * e["d_hidden"] for factor, e in zip(factors, expected)])
    d_unembed = sum(factor * e["d_unembed"] for factor, e in zip(factors, expected))
    np.testing.assert_allclose(found[0], d_hidden, rtol=EXACT, atol=EXACT)
    np.testing.assert_allclose(found[1], d_unembed, rtol=EXACT, atol=EXACT)
    for head, e in zip(heads, expected):
        for name in ("objective", "z_objective", "xent", "z_term"):
            np.testing.assert_allclose(getattr(head, name), e[name], rtol=EXACT, atol=EXACT)


def test_token_cotangents_are_honoured(x64):
    hidden, unembed, targets, mask, _ = (jnp.asarray(part) for part in _case())
    rules = dataclasses.replace(EVERYTHING, z_loss_multiplier=0.0)
    options = {"logit_soft_cap": 2.0, "label_smoothing": 0.1, "vocab_size": CLASSES}

    def weigh(losses):  # weights that depend on the losses
        return jnp.sum(jnp.sin(losses.xent)) + jnp.sum(jnp.cos(losses.z_term))

    def fused(hidden, unembed):
        execution = _tiles(8, 16)
        return weigh(
            eqx_loss.linear_token_cross_entropy(
                hidden, unembed, targets, mask, rules=rules, execution=execution
            )
        )

    def plain(hidden, unembed):
        return weigh(eqx_loss.cross_entropy(hidden @ unembed, targets, mask, **options))

    value, found = jax.jit(jax.value_and_grad(fused, (0, 1)))(hidden, unembed)
    expected_value, expected = jax.jit(jax.value_and_grad(plain, (0, 1)))(hidden, unembed)
    np.testing.assert_allclose(value, expected_value, rtol=EXACT)
    np.testing.assert_allclose(found[0], expected[0], rtol=EXACT, atol=EXACT)
    np.testing.assert_allclose(found[1], expected[1], rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_masked_rows_may_hold_anything(x64, poison):
    hidden, unembed, targets, mask, weights = _case()
    expected = _expected((hidden, unembed, targets, mask, weights), EVERYTHING)
    hidden = np.where(mask[..., None], hidden, poison)
    targets = np.where(mask, targets, -100)
    found = _value_and_grad((hidden, unembed, targets, mask, weights), EVERYTHING, _tiles(8, 16))
    _assert_equal(found, expected)


def test_a_logged_row_without_weight_spoils_no_gradient(x64):
    hidden, unembed, targets, mask, weights = _case()
    weights[0, 0] = 0
    expected = _expected((hidden, unembed, targets, mask, weights), XentRules())
    hidden[0, 0] = np.nan
    loss, (d_hidden, d_unembed) = _value_and_grad(
        (hidden, unembed, targets, mask, weights), execution=_tiles(8, 16)
    )
    assert np.isnan(loss.xent[0, 0])
    np.testing.assert_allclose(d_hidden, expected["d_hidden"], rtol=EXACT, atol=EXACT)
    np.testing.assert_allclose(d_unembed, expected["d_unembed"], rtol=EXACT, atol=EXACT)


def test_padding_columns_may_hold_anything(x64):
    case = _case()
    expected = _expected(case, EVERYTHING)
    hidden, unembed, *rest = case
    unembed = unembed.copy()
    unembed[:, CLASSES:] = np.nan
    _assert_equal(_value_and_grad((hidden, unembed, *rest), EVERYTHING, _tiles(8, 16)), expected)


def test_scored_target_that_is_no_class_gives_nan():
    hidden, unembed, targets, mask, weights = _case(dtype=np.float32)
    targets[0, 0] = CLASSES
    rules = XentRules(vocab_size=CLASSES)
    loss, _ = _value_and_grad((hidden, unembed, targets, mask, weights), rules, _tiles(8, 16))
    assert np.isnan(loss.xent[0, 0])
    assert np.isnan(loss.objective)
    assert np.isfinite(np.asarray(loss.xent).ravel()[1:]).all()


def test_weights_outside_the_mask_do_not_count(x64):
    hidden, unembed, targets, mask, weights = _case()
    found = _value_and_grad((hidden, unembed, targets, mask, weights + 1.0 * ~mask), execution=_tiles(8, 16))
    _assert_equal(found, _expected((hidden, unembed, targets, mask, weights), XentRules()))


def test_nothing_scored_gives_zero_with_zero_gradient():
    hidden, unembed, targets, mask, weights = _case(dtype=np.float32)
    hidden = np.full_like(hidden, np.nan)
    loss, gradients = _value_and_grad((hidden, unembed, targets, mask & False, 0 * weights), EVERYTHING)
    for leaf in jax.tree.leaves((loss, gradients)):
        assert not np.asarray(leaf).any()


@pytest.mark.parametrize("shape", [(0, LENGTH), (ROWS, 0)])
def test_empty_batch_gives_zero(shape):
    hidden, unembed = np.zeros((*shape, WIDTH), np.float32), np.ones((WIDTH, VOCAB), np.float32)
    case = (hidden, unembed, np.zeros(shape, int), np.zeros(shape, bool), np.zeros(shape, np.float32))
    loss, gradients = _value_and_grad(case)
    assert loss.objective == 0
    assert not np.asarray(gradients[1]).any()


def test_one_token_and_one_column(x64):
    case = (
        np.ones((1, 1, 2)),
        np.ones((2, 1)),
        np.zeros((1, 1), int),
        np.ones((1, 1), bool),
        np.ones((1, 1)),
    )
    loss, gradients = _value_and_grad(case)
    assert loss.objective == 0
    assert not np.asarray(gradients[0]).any()


def test_weights_and_logged_losses_have_no_gradient():
    hidden, unembed, targets, mask, weights = (jnp.asarray(part) for part in _case(dtype=np.float32))

    def objective(weights):
        return eqx_loss.linear_cross_entropy(hidden, unembed, targets, weights, mask=mask).objective

    def logged(hidden):
        loss = eqx_loss.linear_cross_entropy(hidden, unembed, targets, weights, mask=mask)
        return jnp.sum(loss.xent) + jnp.sum(loss.z_term)

    assert not jnp.any(jax.grad(objective)(weights))
    assert not jnp.any(jax.grad(logged)(hidden))


def test_mask_defaults_to_the_tokens_with_weight(x64):
    hidden, unembed, targets, _, weights = _case()
    loss = eqx_loss.linear_cross_entropy(*(jnp.asarray(part) for part in (hidden, unembed, targets, weights)))
    np.testing.assert_allclose(
        loss.xent, oracle.head(hidden, unembed, targets, weights != 0, weights)["xent"], rtol=EXACT
    )


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), keep=st.floats(0, 1))
def test_objective_and_gradient_add_over_micro_steps(seed, keep):
    """A batch is the sum of its rows, whatever the mask: one row is a micro-step here."""
    with jax.enable_x64(True):
        hidden, unembed, targets, mask, weights = (jnp.asarray(part) for part in _case(seed, keep=keep))
        whole, gradients = _split_sum(hidden, unembed, targets, mask, weights)
        np.testing.assert_allclose(whole[0], whole[1], rtol=EXACT, atol=EXACT)
        np.testing.assert_allclose(gradients[0], gradients[1], rtol=EXACT, atol=EXACT)


@jax.jit
def _split_sum(hidden, unembed, targets, mask, weights):
    def objective(unembed, *part):
        return eqx_loss.linear_cross_entropy(
            part[0], unembed, part[1], part[3], mask=part[2], execution=_tiles(4, 16)
        ).objective

    parts = (hidden, targets, mask, weights)
    whole, gradient = jax.value_and_grad(objective)(unembed, *parts)

    def step(carry, row):
        value, slope = jax.value_and_grad(objective)(unembed, *(part[None] for part in row))
        return (carry[0] + value, carry[1] + slope), None

    (total, slope), _ = jax.lax.scan(step, (0.0 * whole, jnp.zeros_like(unembed)), parts)
    return (whole, total), (gradient, slope)


def test_remat_and_vmap_give_the_same_gradients(x64):
    case = _case()
    hidden, unembed, targets, mask, weights = (jnp.asarray(part) for part in case)
    rules = dataclasses.replace(EVERYTHING, z_loss_multiplier=0.0)

    @jax.checkpoint
    def objective(hidden, unembed, targets, mask, weights):
        return eqx_loss.linear_cross_entropy(
            hidden[None],
            unembed,
            targets[None],
            weights[None],
            mask=mask[None],
            rules=rules,
            execution=_tiles(4, 16),
        ).objective

    def by_row(hidden, unembed):
        return jnp.sum(jax.vmap(objective, (0, None, 0, 0, 0))(hidden, unembed, targets, mask, weights))

    d_hidden, d_unembed = jax.jit(jax.grad(by_row, (0, 1)))(hidden, unembed)
    expected = _expected(case, rules)
    np.testing.assert_allclose(d_hidden, expected["d_hidden"], rtol=EXACT, atol=EXACT)
    np.testing.assert_allclose(d_unembed, expected["d_unembed"], rtol=EXACT, atol=EXACT)
