"""Thirty lines of plain JAX: per-sample normalization under gradient accumulation."""

import jax
import jax.numpy as jnp

from eqx_loss import Granularity, cross_entropy, head_loss, token_weights

VOCAB, ROWS, POSITIONS, MICRO_STEPS = 11, 8, 6, 4


def loss_of(table, batch):
    """Objective of some rows; their weights came from the whole batch."""
    losses = cross_entropy(table[batch["tokens"]], batch["targets"], batch["mask"])
    return head_loss(losses, batch["weights"]).objective


def gradient(table, batch, micro_steps):
    """Loss and gradient of one optimizer step: the sum over micro-steps, nothing divided."""
    cut = jax.tree.map(lambda x: x.reshape(micro_steps, -1, *x.shape[1:]), batch)

    def add(total, part):
        return jax.tree.map(jnp.add, total, jax.value_and_grad(loss_of)(table, part)), None

    return jax.lax.scan(add, (jnp.zeros(()), jnp.zeros_like(table)), cut)[0]


def make_batch(key):
    """Rows of different lengths, one of them empty; weights before any model runs."""
    tokens = jax.random.randint(key, (ROWS, POSITIONS + 1), 0, VOCAB)
    mask = jnp.arange(POSITIONS) < jnp.array([6, 1, 3, 0, 5, 2, 4, 6])[:, None]
    weights = token_weights(mask, Granularity.SAMPLE)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "mask": mask, "weights": weights}


def main():
    step = jax.jit(gradient, static_argnums=2)
    table, batch = jnp.zeros((VOCAB, VOCAB)), make_batch(jax.random.key(0))
    for number in range(20):
        loss, grad = step(table, batch, MICRO_STEPS)
        _, whole = step(table, batch, 1)
        assert jnp.allclose(grad, whole, rtol=1e-5, atol=1e-7)  # float32, eight rows
        table = table - 1.0 * grad
        print(f"step {number} loss {loss:.4f}")
    return float(loss)


if __name__ == "__main__":
    main()
