"""Flax NNX: the same weights in an NNX training step with accumulation."""

import jax
import jax.numpy as jnp
from flax import nnx

from eqx_loss import Granularity, cross_entropy, head_loss, token_weights

VOCAB, WIDTH, ROWS, POSITIONS = 11, 8, 8, 6


class Bigram(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCAB, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        return self.head(self.embed(tokens))


def loss_of(model, tokens, targets, mask, weights):
    return head_loss(cross_entropy(model(tokens), targets, mask), weights).objective


def gradient(model, batch, micro_steps):
    """The gradient of one optimizer step, summed over micro-steps."""
    parts = zip(*(jnp.split(array, micro_steps) for array in batch))
    grads = [nnx.grad(loss_of)(model, *part) for part in parts]
    return jax.tree.map(lambda *leaves: sum(leaves), *grads)


def main():
    model = Bigram(nnx.Rngs(0))
    tokens = jax.random.randint(jax.random.key(0), (ROWS, POSITIONS + 1), 0, VOCAB)
    mask = jnp.arange(POSITIONS) < jnp.array([6, 1, 3, 0, 5, 2, 4, 6])[:, None]
    batch = (tokens[:, :-1], tokens[:, 1:], mask, token_weights(mask, Granularity.SAMPLE))
    for whole, cut in zip(
        jax.tree.leaves(gradient(model, batch, 1)), jax.tree.leaves(gradient(model, batch, 4))
    ):
        assert jnp.allclose(whole, cut, rtol=1e-5, atol=1e-7)
    before = loss_of(model, *batch)
    params = jax.tree.map(lambda p, g: p - 1.0 * g, nnx.state(model, nnx.Param), gradient(model, batch, 4))
    nnx.update(model, params)
    after = loss_of(model, *batch)
    print(f"loss {before:.4f} -> {after:.4f}")
    return float(before), float(after)


if __name__ == "__main__":
    main()
