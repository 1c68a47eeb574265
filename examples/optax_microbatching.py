"""optax.microbatching: weights from the whole batch, gradients summed over micro-batches."""

import jax
import jax.numpy as jnp
import optax

from eqx_loss import Granularity, cross_entropy, head_loss, token_weights

VOCAB, ROWS, POSITIONS = 11, 8, 6


def loss_of(table, tokens, targets, mask, weights):
    return head_loss(cross_entropy(table[tokens], targets, mask), weights).objective


def gradient(table, batch, microbatch_size):
    """The gradient of the step. SUM is the rule; with MEAN, multiply by the number of micro-batches."""
    summed = optax.microbatching.microbatch(
        jax.grad(loss_of), argnums=(1, 2, 3, 4), microbatch_size=microbatch_size,
        accumulator=optax.microbatching.AccumulationType.SUM,
    )  # fmt: skip
    return summed(table, *batch)


def make_batch(key, granularity):
    tokens = jax.random.randint(key, (ROWS, POSITIONS + 1), 0, VOCAB)
    mask = jnp.arange(POSITIONS) < jnp.array([6, 1, 3, 0, 5, 2, 4, 6])[:, None]
    weights = token_weights(mask, granularity, micro_batch_size=2)
    return tokens[:, :-1], tokens[:, 1:], mask, weights


def main():
    table = 0.1 * jax.random.normal(jax.random.key(1), (VOCAB, VOCAB))
    for granularity in (Granularity.TOKEN, Granularity.SAMPLE, Granularity.MICRO_BATCH):
        batch = make_batch(jax.random.key(0), granularity)
        whole = jax.grad(loss_of)(table, *batch)
        for size in (1, 2, 4, 8):
            assert jnp.allclose(gradient(table, batch, size), whole, rtol=1e-5, atol=1e-7)
    update, _ = optax.sgd(1.0).update(whole, optax.sgd(1.0).init(table))
    before, after = loss_of(table, *batch), loss_of(optax.apply_updates(table, update), *batch)
    print(f"loss {before:.4f} -> {after:.4f}")
    return float(before), float(after)


if __name__ == "__main__":
    main()
