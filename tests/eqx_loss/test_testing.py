"""The invariance check: passes our loss in every setting, names the fault of faulty ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import eqx_loss
from eqx_loss import Granularity, testing

ROWS, LENGTH, WIDTH, VOCAB = 4, 8, 3, 5
PARTITIONS = [
    testing.micro_steps(2),
    testing.row_shards(4),
    testing.sequence_shards(2),
    testing.tiles(2, 4),
    testing.Partition(name="uneven", row_cuts=(1,), position_cuts=(3,)),
]


def _batch():
    rng = np.random.default_rng(0)
    return {
        "inputs": jnp.asarray(rng.normal(size=(ROWS, LENGTH, WIDTH)), jnp.float32),
        "targets": jnp.asarray(rng.integers(0, VOCAB, (ROWS, LENGTH))),
        "mask": jnp.arange(LENGTH) < jnp.array([[8], [3], [0], [5]]),
    }


def _params():
    return jnp.asarray(np.random.default_rng(1).normal(size=(WIDTH, VOCAB)), jnp.float32)


def _xent(params, part):
    logits = jnp.einsum("bsd,dv->bsv", part["inputs"], params)
    return eqx_loss.cross_entropy(logits, part["targets"], part["mask"])


def weighted(params, part):
    return eqx_loss.head_loss(_xent(params, part), part["weights"]).objective


def with_weights(granularity):
    return lambda batch: {**batch, "weights": eqx_loss.token_weights(batch["mask"], granularity)}


def own_mean(params, part):
    return eqx_loss.sum_count(_xent(params, part).xent, part["mask"]).value()


def scored(part):
    return part["mask"].sum()


def _scanned(params, part):
    """The same loss position by position, rematerialized, under vmap over rows."""

    def row(one):
        def step(total, t):
            piece = jax.tree.map(lambda a: a[t][None, None], one)
            return total + weighted(params, piece), None

        return jax.lax.scan(jax.checkpoint(step), jnp.zeros(()), jnp.arange(one["mask"].shape[0]))[0]

    return jnp.sum(jax.vmap(row)(part))


def _on_devices(params, part):
    """The same loss with the positions of every part on two devices."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("context",), axis_types=(AxisType.Auto,))
    specs = jax.tree.map(lambda _: P(None, "context"), part)
    total = jax.shard_map(
        lambda p, b: jax.lax.psum(weighted(p, b), "context"), mesh=mesh, in_specs=(P(), specs), out_specs=P()
    )
    return total(params, part)


@pytest.mark.slow
@pytest.mark.parametrize("granularity", [Granularity.TOKEN, Granularity.SAMPLE])
@pytest.mark.parametrize("loss_fn", [weighted, jax.jit(weighted), _scanned])
def test_weighted_loss_is_invariant(granularity, loss_fn):
    testing.assert_partition_invariant(
        loss_fn,
        _batch(),
        PARTITIONS,
        params=_params(),
        prepare=with_weights(granularity),
        vocab_size=VOCAB,
    )


@pytest.mark.parametrize("granularity", [Granularity.TOKEN, Granularity.SAMPLE])
def test_weighted_loss_inside_shard_map_is_invariant(granularity):
    testing.assert_partition_invariant(
        jax.jit(_on_devices),
        _batch(),
        PARTITIONS[:-1],  # the last one cuts positions unevenly, which two devices cannot hold
        params=_params(),
        prepare=with_weights(granularity),
        vocab_size=VOCAB,
    )


@pytest.mark.parametrize(
    ("loss_fn", "combine", "batch_mask", "message"),
    [
        (own_mean, "sum", "even", "parts' means are summed"),
        (own_mean, "mean", "uneven", "mean of the parts' own means"),
        (lambda p, b: weighted(p, b), "mean", "uneven", "divided by the number of parts"),
    ],
)
def test_faulty_combination_is_named(loss_fn, combine, batch_mask, message):
    batch = _batch()
    if batch_mask == "even":
        batch["mask"] = jnp.ones((ROWS, LENGTH), bool)
        # Equal losses of both parts, so that only the factor is wrong.
        batch = jax.tree.map(lambda a: jnp.concatenate([a[:2], a[:2]]), batch)
    with pytest.raises(AssertionError, match=message):
        testing.assert_partition_invariant(
            loss_fn,
            batch,
            [testing.micro_steps(2)],
            params=_params(),
            prepare=with_weights(Granularity.TOKEN),
            combine=combine,
            num_tokens=scored,
        )


@pytest.mark.parametrize(
    ("ratio", "message"),
    [
        (2.0, "number of parts"),
        (0.5, "once too often"),
        (20.0, "a sum is used"),
        (1 / 20, "divided by the token count once more"),
        (20 / 24, "count after the label shift"),
        (24 / 20, "shift is applied twice"),
        (1.337, "No known fault"),
    ],
)
def test_cause_is_named_by_its_ratio(ratio, message):
    text = testing.likeliest_cause(
        found=3.0 * ratio,
        expected=3.0,
        part_values=[1.0, 9.0],
        part_tokens=[8.0, 12.0],
        num_rows=4,
        gradient_ratio=ratio,
    )
    assert message in text


def test_gradient_that_is_scaled_outside_the_loss_is_named():
    text = testing.likeliest_cause(
        found=3.0, expected=3.0, part_values=[1.0, 2.0], part_tokens=None, num_rows=4, gradient_ratio=4.0
    )
    assert "gradient is 4 times as large" in text


def test_zero_gradient_is_refused_as_vacuous():
    batch = _batch()
    batch["mask"] = jnp.zeros((ROWS, LENGTH), bool)
    with pytest.raises(AssertionError, match="vacuous: the gradient of the whole batch is 0"):
        testing.assert_partition_invariant(own_mean, batch, [testing.micro_steps(2)], params=_params())


def test_uniform_prediction_is_refused_as_vacuous():
    with pytest.raises(AssertionError, match=r"vacuous: the loss is log\(5\)"):
        testing.assert_partition_invariant(
            own_mean, _batch(), [testing.micro_steps(2)], params=0 * _params(), vocab_size=VOCAB
        )


def test_nan_loss_is_refused_as_vacuous():
    with pytest.raises(AssertionError, match="not finite"):
        testing.assert_partition_invariant(
            own_mean, _batch(), [testing.micro_steps(2)], params=_params() * jnp.nan
        )


def test_partition_that_cuts_nothing_is_refused_as_vacuous():
    with pytest.raises(AssertionError, match="no partition cuts the batch"):
        testing.assert_partition_invariant(own_mean, _batch(), [testing.micro_steps(1)], params=_params())


def test_part_count_must_divide_the_rows():
    with pytest.raises(ValueError, match="3 parts must divide the 4 rows"):
        testing.assert_partition_invariant(own_mean, _batch(), [testing.micro_steps(3)], params=_params())


def _mesh():
    return Mesh(np.array(jax.devices()[:4]), ("data",), axis_types=(AxisType.Auto,))


def test_sharded_rows_give_the_loss_and_gradient_of_one_device():
    batch, params = with_weights(Granularity.SAMPLE)(_batch()), _params()
    expected = jax.value_and_grad(weighted)(params, batch)
    rows = jax.device_put(batch, NamedSharding(_mesh(), P("data")))
    found = jax.jit(jax.value_and_grad(weighted))(params, rows)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
        np.testing.assert_allclose(a, b, rtol=1e-5)  # float32, 16 terms


def _accumulated(mesh, *, weighted_before):
    """Two micro-steps of sharded rows; normalizing inside the step needs a count from all devices."""

    def per_device(params, batch):
        def step(gradient, part):
            def loss(p):
                if weighted_before:
                    return weighted(p, part)
                losses = _xent(p, part)
                count = jax.lax.psum(part["mask"].sum(), "data")
                return jnp.sum(losses.xent) / jnp.maximum(count, 1) / 2

            return gradient + jax.grad(loss)(params), None

        parts = jax.tree.map(lambda a: a.reshape(2, a.shape[0] // 2, *a.shape[1:]), batch)
        gradient, _ = jax.lax.scan(step, 0 * params, parts)
        return jax.lax.psum(gradient, "data")

    def program(params, batch):
        varying = jax.shard_map(
            lambda p, b: per_device(jax.lax.pcast(p, ("data",), to="varying"), b),
            mesh=mesh,
            in_specs=(P(), P("data")),
            out_specs=P(),
        )
        return varying(params, batch)

    return jax.jit(program)


def test_accumulation_with_weights_has_no_collective_in_its_loop_and_normalizing_inside_has():
    batch = jax.tree.map(lambda a: jnp.concatenate([a, a]), _batch())
    batch, params = with_weights(Granularity.TOKEN)(batch), _params()
    program = _accumulated(_mesh(), weighted_before=True)
    hlo = program.lower(params, batch).compile().as_text()
    assert "while" in hlo
    assert "all-reduce" in hlo
    assert testing.collectives_in_loops(hlo) == []
    np.testing.assert_allclose(
        program(params, batch), jax.grad(weighted)(params, batch), rtol=1e-5, atol=1e-7
    )
    other = _accumulated(_mesh(), weighted_before=False).lower(params, batch).compile().as_text()
    assert testing.collectives_in_loops(other) != []
