"""Objective and logs against looped oracles, and their invariance to any cut of the batch."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_loss
from eqx_loss import LoadBalanceScope, LossSemantics
from tests.oracles import channels
from tests.oracles import weights as weight_oracle

ROWS, LENGTH, DEPTHS, LAYERS, EXPERTS, ACTIVE = 8, 6, 2, 3, 5, 2
Z, BALANCE, LM_Z = 3e-2, 2e-2, 1e-2
RTOL = 1e-12  # float64, sums of at most 144 terms
CUTS = {"one step": [8], "four even": [2, 2, 2, 2], "uneven": [2, 4, 2], "eight": [1] * 8}
FLAGS = list(itertools.product([False, True], [1, 2]))


def semantics(per_token, size, **options):
    return LossSemantics(
        calculate_per_token_loss=per_token,
        micro_batch_size=size,
        moe_z_loss_weight=Z,
        load_balance_loss_weight=BALANCE,
        z_loss_multiplier=LM_Z,
        **options,
    )


class Batch:
    """Uneven rows, one row of padding only, one group of two rows whose MTP masks are empty."""

    def __init__(self, seed=0):
        rng = np.random.default_rng(seed)
        lengths = np.array([6, 2, 0, 5, 1, 1, 4, 6])
        self.mask = np.arange(LENGTH) < lengths[:, None]
        self.mask[3, 1] = False
        self.segment_ids = np.where(np.arange(LENGTH) < np.maximum(lengths, 0)[:, None], 1, 0)
        self.segment_ids[0, 3:] = 2
        self.losses = rng.gamma(2.0, 2.0, (1 + DEPTHS, ROWS, LENGTH))
        self.z_terms = rng.gamma(2.0, 2.0, (ROWS, LENGTH))
        self.logsumexp = rng.normal(2, 1, (LAYERS, ROWS, LENGTH))
        raw = rng.random((LAYERS, ROWS, LENGTH, EXPERTS))
        self.scores = raw / raw.sum(-1, keepdims=True)
        self.selected = np.argsort(-raw, axis=-1)[..., :ACTIVE]
        self.mtp_masks = [
            weight_oracle.shifted(self.mask, self.segment_ids, k, False) for k in range(1, DEPTHS + 1)
        ]


def outputs(losses, batch, rules, cut):
    """One `LossOutput`, the sum over consecutive parts of `cut` rows."""
    weights = eqx_loss.loss_weights(
        jnp.asarray(batch.mask), rules, num_mtp_layers=DEPTHS, segment_ids=jnp.asarray(batch.segment_ids)
    )
    positions = weights.router_mask
    score_sums = jnp.sum(jnp.asarray(batch.scores) * positions[..., None], axis=2)
    counts = jax.vmap(lambda chosen: eqx_loss.expert_counts(chosen, positions, EXPERTS))(
        jnp.asarray(batch.selected)
    )
    total, start = None, 0
    for size in cut:
        rows = slice(start, start + size)
        part = jax.tree.map(lambda a, r=rows: a[r] if a.shape[0] == ROWS else a[:, r], weights)
        heads = [
            eqx_loss.head_loss(
                eqx_loss.TokenLosses(jnp.where(mask, losses[k, rows], 0), jnp.where(mask, z_terms, 0)),
                w,
                z_loss_multiplier=LM_Z if k == 0 else 0.0,
            )
            for k, (mask, w) in enumerate(
                [(part.lm_mask, part.lm_objective)]
                + [(part.mtp_mask[k], part.mtp_objective[k]) for k in range(DEPTHS)]
            )
            for z_terms in [jnp.asarray(batch.z_terms)[rows]]
        ]
        router = eqx_loss.RouterTerms(
            jnp.asarray(batch.logsumexp)[:, rows],
            score_sums[:, rows],
            counts[:, rows],
            jnp.sum(counts, axis=1),
        )
        output = eqx_loss.loss_output(heads[0], tuple(heads[1:]), router, part, rules)
        total = output if total is None else eqx_loss.add_outputs(total, output)
        start += size
    return total


@pytest.mark.parametrize(("per_token", "size"), FLAGS)
@pytest.mark.parametrize("mask_padding", [False, True])
def test_objective_of_every_term_equals_the_looped_oracle(x64, per_token, size, mask_padding):
    batch = Batch()
    positions = batch.segment_ids != 0 if mask_padding else np.ones_like(batch.mask)
    for scope, unit in zip(LoadBalanceScope, (size, 1, ROWS)):
        rules = semantics(
            per_token, size, load_balance_scope=scope, mask_padding_in_router_losses=mask_padding
        )
        found = outputs(jnp.asarray(batch.losses), batch, rules, CUTS["one step"]).objective
        expected = {
            "lm": channels.lm(batch.losses[0], batch.mask, per_token, size),
            "lm_z": LM_Z * channels.lm(batch.z_terms, batch.mask, per_token, size),
            "mtp": channels.mtp(batch.losses[1:], batch.mtp_masks, batch.mask, per_token, True, size, 0.1),
            "router_z": channels.router_z(batch.logsumexp, positions, batch.mask, per_token, size, Z),
            "load_balance": channels.load_balance(
                batch.scores, batch.selected, positions, batch.mask, per_token, unit, BALANCE
            ),
        }
        for name, value in expected.items():
            np.testing.assert_allclose(getattr(found, name), value, rtol=RTOL, err_msg=name)
        np.testing.assert_allclose(found.total, sum(expected.values()), rtol=RTOL)


def test_pooled_mtp_divides_all_depths_by_their_common_count(x64):
    batch = Batch()
    rules = semantics(False, 1, mtp_per_layer_loss_norm=False)
    found = outputs(jnp.asarray(batch.losses), batch, rules, CUTS["one step"]).objective.mtp
    expected = channels.mtp(batch.losses[1:], batch.mtp_masks, batch.mask, False, False, 1, 0.1)
    np.testing.assert_allclose(found, expected, rtol=RTOL)


@pytest.mark.parametrize(("per_token", "size"), FLAGS)
def test_logs_are_global_for_lm_and_means_over_micro_batches_for_the_rest(x64, per_token, size):
    batch = Batch()
    logs = outputs(jnp.asarray(batch.losses), batch, semantics(per_token, size), CUTS["one step"]).logs
    everywhere = np.ones_like(batch.mask)
    np.testing.assert_allclose(logs.lm.value(), channels.lm(batch.losses[0], batch.mask, True, 1), rtol=RTOL)
    np.testing.assert_allclose(logs.lm_z.value(), channels.lm(batch.z_terms, batch.mask, True, 1), rtol=RTOL)
    for k in range(DEPTHS):
        expected = channels.lm(batch.losses[1 + k], batch.mtp_masks[k], False, size)
        np.testing.assert_allclose(logs.mtp.value()[k], expected, rtol=RTOL)
    for layer in range(LAYERS):
        expected = channels.lm(batch.logsumexp[layer] ** 2, everywhere, False, size)
        np.testing.assert_allclose(logs.router_z.value()[layer], expected, rtol=RTOL)
        expected = channels.load_balance(
            batch.scores[layer : layer + 1],
            batch.selected[layer : layer + 1],
            everywhere,
            batch.mask,
            False,
            size,
            1.0,
        )
        np.testing.assert_allclose(logs.load_balance.value()[layer], expected, rtol=RTOL)
    gap = eqx_loss.estimator_gap(logs.lm_group, logs.lm)
    expected = channels.lm(batch.losses[0], batch.mask, False, size) - float(logs.lm.value())
    np.testing.assert_allclose(gap, expected, rtol=1e-11)


@pytest.mark.parametrize(("per_token", "size"), FLAGS)
def test_objective_gradient_and_logs_do_not_depend_on_the_cut(x64, per_token, size):
    batch = Batch()
    for scope in LoadBalanceScope:
        rules = semantics(per_token, size, load_balance_scope=scope)

        def total(losses, cut, rules=rules):
            output = outputs(losses, batch, rules, cut)
            return output.objective.total, output

        reference = None
        for name, cut in CUTS.items():
            if size == 2 and any(part % 2 for part in cut):
                continue
            (_, output), gradient = jax.value_and_grad(total, has_aux=True)(jnp.asarray(batch.losses), cut)
            if reference is None:
                reference = output, gradient
                assert jnp.abs(gradient).sum() > 0
            for found, expected in zip(jax.tree.leaves((output, gradient)), jax.tree.leaves(reference)):
                np.testing.assert_allclose(found, expected, rtol=RTOL, atol=1e-14, err_msg=name)


def test_no_flag_changes_the_lm_log():
    batch = Batch()
    values = {
        float(outputs(jnp.asarray(batch.losses, jnp.float32), batch, semantics(p, s), [8]).logs.lm.value())
        for p, s in FLAGS
    }
    assert len(values) == 1


def test_empty_micro_batches_leave_every_log_finite():
    batch = Batch()
    batch.mask[:] = False
    batch.mtp_masks = [m & False for m in batch.mtp_masks]
    output = outputs(jnp.asarray(batch.losses, jnp.float32), batch, semantics(False, 1), [8])
    assert output.objective.lm == 0
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(output))
    assert jnp.isfinite(output.logs.mtp.value()).all()


def test_indexer_warm_up_zeroes_the_lm_objective_and_no_log():
    batch = Batch()
    losses = jnp.asarray(batch.losses, jnp.float32)
    on, off = (outputs(losses, batch, semantics(False, 1, train_lm=flag), [8]) for flag in (True, False))
    assert off.objective.lm == 0
    assert off.objective.lm_z == 0
    for found, expected in zip(jax.tree.leaves(off.logs), jax.tree.leaves(on.logs)):
        assert jnp.array_equal(found, expected)


def test_reported_loss_is_the_objective_without_accumulation_and_lm_log_plus_terms_with_it(x64):
    batch = Batch()
    rules = semantics(False, 1)
    output = outputs(jnp.asarray(batch.losses), batch, rules, [8])
    assert eqx_loss.reported_loss(output, rules, gradient_accumulation_steps=1) == output.objective.total
    found = eqx_loss.reported_loss(output, rules, gradient_accumulation_steps=4)
    terms = output.objective.mtp + output.objective.router_z + output.objective.load_balance
    np.testing.assert_allclose(found, output.logs.lm.value() + terms + output.objective.lm_z, rtol=RTOL)


def test_weighted_router_term_without_router_facts_is_refused():
    batch = Batch()
    rules = semantics(False, 1)
    weights = eqx_loss.loss_weights(jnp.asarray(batch.mask), rules)
    head = eqx_loss.head_loss(
        eqx_loss.TokenLosses(jnp.zeros((ROWS, LENGTH)), jnp.zeros((ROWS, LENGTH))), weights.lm_objective
    )
    with pytest.raises(ValueError, match="moe_z_loss_weight is 0.03 but no router facts"):
        eqx_loss.loss_output(head, (), None, weights, rules)


def test_number_of_heads_must_match_the_weights():
    batch = Batch()
    rules = LossSemantics(calculate_per_token_loss=True)
    weights = eqx_loss.loss_weights(jnp.asarray(batch.mask), rules, num_mtp_layers=2)
    head = eqx_loss.head_loss(
        eqx_loss.TokenLosses(jnp.zeros((ROWS, LENGTH)), jnp.zeros((ROWS, LENGTH))), weights.lm_objective
    )
    with pytest.raises(ValueError, match="got 1 MTP heads but weights for 2"):
        eqx_loss.loss_output(head, (head,), None, weights, rules)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"micro_batch_size": 0}, "micro_batch_size must be at least 1, got 0"),
        ({"moe_z_loss_weight": -1.0}, "moe_z_loss_weight must be finite and >= 0, got -1.0"),
        ({"z_loss_multiplier": float("nan")}, "z_loss_multiplier must be finite"),
    ],
)
def test_semantics_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        LossSemantics(calculate_per_token_loss=True, **options)
