"""Profiles against loops that do what each framework does, and what they have to do with our rules."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_loss import (
    MEGATRON_RELEASES,
    BatchLayout,
    HeadLoss,
    LoadBalanceScope,
    LossSemantics,
    RouterTerms,
    loss_output,
    loss_weights,
    maxtext_logs,
    megatron_logs,
    megatron_rules,
)
from tests.oracles import frameworks

RTOL = 1e-12  # float64, at most 64 terms a sum
MASKS = np.array(
    [
        [1, 1, 1, 1, 1, 1, 0, 0],
        [1, 0, 0, 0, 0, 0, 0, 0],
        [0, 1, 1, 0, 1, 1, 1, 1],
        [1, 1, 1, 1, 1, 1, 1, 1],
    ],
    float,
)
EMPTY = np.where(np.arange(4)[:, None] == 1, 0.0, MASKS)
FRACTIONS = MASKS * np.linspace(0.3, 1.3, 32).reshape(4, 8)
PADDING = np.arange(8)[None] >= np.array([6, 3, 8, 7])[:, None]


def _losses(depths: int, seed: int = 0) -> list[np.ndarray]:
    return list(np.random.default_rng(seed).uniform(1, 9, (depths + 2, 4, 8)))


def _values(semantics, masks, losses, router, *, padding=None, layout=None, segment_ids=None):
    """(lm, mtp, z) by our weights; positions outside the mask hold whatever the loss is there."""
    mask = jnp.asarray(masks)
    weights = loss_weights(
        mask != 0,
        semantics,
        num_mtp_layers=len(losses) - 1,
        token_scale=mask,
        segment_ids=segment_ids,
        router_mask=None if padding is None else jnp.asarray(~padding),
        layout=layout,
    )
    lm = jnp.sum(jnp.where(weights.lm_mask, weights.lm_objective * losses[0], 0))
    mtp = [
        jnp.sum(jnp.where(m, w * x, 0))
        for m, w, x in zip(weights.mtp_mask, weights.mtp_objective, losses[1:])
    ]
    return float(lm), float(sum(mtp)), float(jnp.sum(weights.router_objective * router))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("masks", [MASKS, EMPTY, FRACTIONS], ids=["uneven", "empty_row", "fractions"])
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("release", MEGATRON_RELEASES)
def test_megatron_objectives_are_those_of_its_loops(release, per_token, masks):
    minor = 19 if release == "main" else int(release.split(".")[1])
    if masks is FRACTIONS and minor < 15:
        # A count cast from below 1 to 0 is inf in value there; ours is NaN, with the same gradient.
        masks = np.where(np.arange(4)[:, None] == 1, MASKS, FRACTIONS)
    *losses, router = _losses(2)
    for dp, cp, size in ((1, 1, 1), (2, 1, 2), (1, 2, 2)):
        if cp > 1 and minor < 14:
            continue
        padding = PADDING if minor >= 16 else None
        expected = frameworks.megatron(
            losses, masks, router, padding,
            minor=minor, per_token=per_token, size=size, dp=dp, cp=cp, factor=0.3,
        )  # fmt: skip
        semantics = LossSemantics.megatron(
            release, calculate_per_token_loss=per_token, micro_batch_size=size, context_parallel_size=cp
        )
        semantics = dataclasses.replace(semantics, mtp_loss_scaling_factor=0.3)
        found = _values(semantics, masks, losses, router, padding=padding)
        np.testing.assert_allclose(found, expected, rtol=RTOL)


@pytest.mark.usefixtures("x64")
def test_megatron_0_12_averages_a_micro_batch_over_context_ranks():
    loss, router = _losses(0)
    for release, minor in (("0.12", 12), ("0.13", 13)):
        expected = frameworks.megatron(
            [loss], MASKS, router, None, minor=minor, per_token=False, size=2, dp=1, cp=2, factor=0.1
        )
        semantics = LossSemantics.megatron(
            release, calculate_per_token_loss=False, micro_batch_size=2, context_parallel_size=2
        )
        np.testing.assert_allclose(_values(semantics, MASKS, [loss], router), expected, rtol=RTOL)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("release", ["0.15", "0.16", "0.17"])
def test_packed_documents_are_cut_and_shifted_as_the_release_does(release, per_token):
    bounds = [[0, 4, 8], [0, 8], [0, 4, 8], [0, 8]]
    ids = np.array([[1] * 4 + [2] * 4, [1] * 8, [1] * 4 + [2] * 4, [1] * 8])
    *losses, router = _losses(1)
    minor = int(release.split(".")[1])
    stops = minor >= 16
    for cp in (1, 2):
        expected = frameworks.megatron(
            losses, MASKS, router, None,
            minor=minor, per_token=per_token, size=1, dp=1, cp=cp, factor=0.1,
            bounds=bounds if stops else None,
        )  # fmt: skip
        if not stops and cp > 1:
            continue  # the shift runs over the row, the cut follows documents: the loops have one bound
        semantics = LossSemantics.megatron(
            release, calculate_per_token_loss=per_token, context_parallel_size=cp, packed_sequences=True
        )
        found = _values(semantics, MASKS, losses, router, segment_ids=jnp.asarray(ids))
        np.testing.assert_allclose(found, expected, rtol=RTOL)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("release", ["0.2.4", "0.2.5"])
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_maxtext_objectives_are_those_of_its_accumulation_loop(release, steps):
    *losses, router = _losses(2)
    expected = frameworks.maxtext(losses[0], losses[1:], MASKS, release=release, steps=steps, factor=0.3)
    semantics = dataclasses.replace(LossSemantics.maxtext(release), mtp_loss_scaling_factor=0.3)
    layout = BatchLayout.strided(steps, 4)
    found = _values(semantics, MASKS, losses, router, layout=layout)
    np.testing.assert_allclose(found[:2], expected, rtol=RTOL)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("masks", [MASKS, EMPTY], ids=["uneven", "empty_row"])
@pytest.mark.parametrize(("items", "across"), [(True, True), (True, False), (False, True)])
def test_hf_trainer_objective_is_that_of_its_loop(items, across, masks):
    loss, router = _losses(0)
    for steps, dp in ((4, 1), (2, 2), (1, 2)):
        expected = frameworks.hf_trainer(loss, masks, items=items, across=across, steps=steps, dp=dp)
        semantics = LossSemantics.hf_trainer(num_items_in_batch=items, average_tokens_across_devices=across)
        layout = BatchLayout(num_micro_batches=steps, data_parallel_size=dp)
        np.testing.assert_allclose(
            _values(semantics, masks, [loss], router, layout=layout)[0], expected, rtol=RTOL
        )


@pytest.mark.usefixtures("x64")
def test_levanter_objective_is_that_of_its_loop():
    loss, router = _losses(0)
    expected = frameworks.levanter(loss, MASKS, steps=2)
    found = _values(LossSemantics.levanter(), MASKS, [loss], router, layout=BatchLayout(num_micro_batches=2))
    np.testing.assert_allclose(found[0], expected, rtol=RTOL)


@pytest.mark.usefixtures("x64")
def test_torchtitan_divides_mtp_by_the_lm_count():
    *losses, router = _losses(2)
    lm, mtp, _ = _values(LossSemantics.torchtitan(), MASKS, losses, router)
    rolled = [np.stack([frameworks.roll(r) for r in MASKS])]
    rolled.append(np.stack([frameworks.roll(r) for r in rolled[0]]))
    assert lm == pytest.approx((losses[0] * MASKS).sum() / MASKS.sum(), rel=RTOL)
    total = sum((x * m).sum() for x, m in zip(losses[1:], rolled))
    assert mtp == pytest.approx(0.3 / 2 * total / MASKS.sum(), rel=RTOL)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("per_token", [False, True])
def test_rfc_0032_and_megatron_0_16_are_ours_where_nothing_is_empty(per_token):
    ours = loss_weights(
        jnp.asarray(MASKS != 0), LossSemantics(calculate_per_token_loss=per_token), num_mtp_layers=1
    )
    rfc = LossSemantics.maxtext("rfc-0032", calculate_per_token_loss=per_token)
    same = loss_weights(jnp.asarray(MASKS != 0), rfc, num_mtp_layers=1)
    assert jax.tree.all(jax.tree.map(np.array_equal, ours, same))
    scored = MASKS.copy()
    scored[1] = [1, 1, 1, 0, 0, 0, 0, 0]
    mask = jnp.asarray(scored != 0)
    ours = loss_weights(mask, LossSemantics(calculate_per_token_loss=per_token), num_mtp_layers=1)
    megatron = LossSemantics.megatron("0.16", calculate_per_token_loss=per_token)
    theirs = loss_weights(mask, megatron, num_mtp_layers=1)
    for name in ("lm_objective", "mtp_objective", "router_objective", "load_balance_objective"):
        np.testing.assert_allclose(getattr(theirs, name), getattr(ours, name), rtol=RTOL)


@pytest.mark.parametrize("release", MEGATRON_RELEASES)
def test_logs_of_a_profile_keep_our_rules(release):
    mask = jnp.asarray(EMPTY != 0)
    ours = loss_weights(mask, LossSemantics(calculate_per_token_loss=False), num_mtp_layers=1)
    theirs = loss_weights(
        mask, LossSemantics.megatron(release, calculate_per_token_loss=False), num_mtp_layers=1
    )
    for name in ("lm_mean", "mtp_mean", "router_mean", "load_balance_mean", "lm_groups", "mtp_groups"):
        assert np.array_equal(getattr(ours, name), getattr(theirs, name)), name
    assert np.array_equal(
        jnp.where(ours.lm_mask, ours.token_scale, 0), jnp.where(theirs.lm_mask, theirs.token_scale, 0)
    )


@pytest.mark.usefixtures("x64")
def test_row_order_moves_the_weights_with_the_rows():
    order = (2, 0, 3, 1)
    semantics = LossSemantics.megatron("0.17", calculate_per_token_loss=True, micro_batch_size=2)
    shuffled = loss_weights(
        jnp.asarray(MASKS != 0),
        semantics,
        num_mtp_layers=2,
        layout=BatchLayout(num_micro_batches=2, row_order=order),
    )
    plain = loss_weights(jnp.asarray(MASKS[list(order)] != 0), semantics, num_mtp_layers=2)
    assert np.array_equal(shuffled.lm_objective[np.array(order)], plain.lm_objective)
    assert np.array_equal(shuffled.mtp_objective[:, np.array(order)], plain.mtp_objective)
    assert np.array_equal(shuffled.load_balance_objective[np.array(order)], plain.load_balance_objective)
    assert np.array_equal(shuffled.mtp_groups[:, np.array(order)], plain.mtp_groups)


def _head(values, mask):
    return HeadLoss(jnp.zeros(()), jnp.zeros(()), jnp.where(mask, values, 0), jnp.where(mask, values, 0))


def test_hugging_face_adds_the_auxiliary_loss_of_every_micro_step():
    semantics = dataclasses.replace(LossSemantics.hf_trainer(), load_balance_loss_weight=1.0)
    once = loss_weights(jnp.asarray(MASKS != 0), semantics, layout=BatchLayout(num_micro_batches=1))
    four = loss_weights(jnp.asarray(MASKS != 0), semantics, layout=BatchLayout(num_micro_batches=4))
    ratio = np.sum(four.load_balance_objective) / np.sum(once.load_balance_objective)
    assert ratio == pytest.approx(4.0)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("scope", [LoadBalanceScope.MICRO_BATCH, LoadBalanceScope.SEQUENCE])
def test_outputs_of_micro_batches_add_up_under_a_profile(scope):
    semantics = dataclasses.replace(
        LossSemantics.megatron("0.16", calculate_per_token_loss=True, micro_batch_size=2),
        load_balance_scope=scope,
        load_balance_loss_weight=0.3,
        moe_z_loss_weight=0.1,
    )
    weights = loss_weights(jnp.asarray(MASKS != 0), semantics)
    rng = np.random.default_rng(0)
    xent = jnp.asarray(rng.uniform(1, 5, (4, 8)))
    facts = RouterTerms(
        jnp.asarray(rng.uniform(1, 3, (2, 4, 8))),
        jnp.asarray(rng.uniform(0, 1, (2, 4, 3))),
        jnp.asarray(rng.integers(1, 9, (2, 4, 3))),
    )

    def output(rows):
        part = jax.tree_util.tree_map_with_path(
            lambda path, a: a[:, rows] if path[0].name.startswith("mtp_") else a[rows], weights
        )
        terms = RouterTerms(*(a[:, rows] for a in facts[:3]))
        return loss_output(_head(xent[rows], weights.lm_mask[rows]), (), terms, part, semantics).objective

    whole = output(slice(0, 4))
    parts = [output(slice(0, 2)), output(slice(2, 4))]
    for name in ("router_z", "load_balance"):
        total = sum(float(getattr(p, name)) for p in parts)
        assert total == pytest.approx(float(getattr(whole, name)), rel=RTOL)
        assert total > 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: megatron_rules("0.11"), "Megatron release must be one of 0.12"),
        (lambda: megatron_rules(""), "Megatron release must be one of"),
        (lambda: megatron_rules("0.16", context_parallel_size=0), "context_parallel_size must be at least 1"),
        (lambda: LossSemantics.maxtext("0.2.3"), "MaxText release must be one of 0.2.4"),
        (lambda: LossSemantics.maxtext("0.2.5", calculate_per_token_loss=False), "use release 'rfc-0032'"),
        (lambda: BatchLayout(num_micro_batches=0), "num_micro_batches must be at least 1"),
        (lambda: BatchLayout(num_micro_batches=1, row_order=(0, 0)), "row_order must name each of 2 rows"),
    ],
)
def test_what_makes_no_sense_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("semantics", "options", "message"),
    [
        (LossSemantics.levanter(), {}, "forms its loss per micro-step, got no layout"),
        (LossSemantics.maxtext("0.2.5"), {"num_mtp_layers": 1}, "got no layout"),
        (
            LossSemantics.megatron("0.13", calculate_per_token_loss=False, context_parallel_size=2),
            {"num_mtp_layers": 1},
            "does not shift MTP targets across context ranks",
        ),
        (
            LossSemantics.megatron("0.16", calculate_per_token_loss=False, context_parallel_size=3),
            {},
            "cuts a row into 6 equal pieces",
        ),
        (
            LossSemantics.megatron("0.16", calculate_per_token_loss=False),
            {"layout": BatchLayout(num_micro_batches=2)},
            "micro-batches of 2 rows but micro_batch_size is 1",
        ),
        (
            LossSemantics.megatron("0.16", calculate_per_token_loss=False),
            {"layout": BatchLayout(num_micro_batches=3)},
            "does not fit 4 rows",
        ),
        (
            dataclasses.replace(
                LossSemantics.megatron("0.16", calculate_per_token_loss=False),
                load_balance_scope=LoadBalanceScope.GLOBAL_BATCH,
            ),
            {},
            "averages counts over the micro-batches so far, got no layout",
        ),
        (
            dataclasses.replace(
                LossSemantics.megatron("0.14", calculate_per_token_loss=False),
                load_balance_scope=LoadBalanceScope.GLOBAL_BATCH,
            ),
            {"layout": BatchLayout(num_micro_batches=4)},
            "has no global_aux_loss",
        ),
    ],
)
def test_a_profile_says_what_it_needs(semantics, options, message):
    with pytest.raises(ValueError, match=message):
        loss_weights(jnp.asarray(MASKS != 0), semantics, **options)


def test_logs_of_one_framework_are_refused_to_another():
    mask = jnp.asarray(MASKS != 0)
    head = _head(jnp.ones((4, 8)), mask)
    layout = BatchLayout(num_micro_batches=4)
    with pytest.raises(ValueError, match="needs a profile made by LossSemantics.megatron"):
        megatron_logs(head, (), None, mask, LossSemantics(calculate_per_token_loss=True), layout=layout)
    ours = LossSemantics(calculate_per_token_loss=True)
    with pytest.raises(ValueError, match="needs a profile made by LossSemantics.maxtext"):
        maxtext_logs(head, (), None, loss_weights(mask, ours), ours, layout=layout)


def test_hugging_face_without_auxiliary_terms_needs_no_layout():
    weights = loss_weights(jnp.asarray(MASKS != 0), LossSemantics.hf_trainer())
    # 1e-6: one float32 quotient
    np.testing.assert_allclose(weights.lm_objective, MASKS / MASKS.sum(), rtol=1e-6)


def test_row_pieces_are_required_under_context_parallelism():
    semantics = dataclasses.replace(
        LossSemantics.megatron("0.16", calculate_per_token_loss=False, context_parallel_size=2),
        load_balance_loss_weight=0.1,
    )
    weights = loss_weights(jnp.asarray(MASKS != 0), semantics)
    facts = RouterTerms(jnp.ones((1, 4, 8)), jnp.ones((1, 4, 3)), jnp.ones((1, 4, 3)))
    with pytest.raises(ValueError, match="4 rows x 2 context ranks, got 4; make them with row_pieces"):
        loss_output(_head(jnp.ones((4, 8)), weights.lm_mask), (), facts, weights, semantics)
