"""MaxText: per-sample normalization through a patched `loss_fn`, with MaxText's own accumulation.

MaxText divides the accumulated gradient by the scored tokens of the global batch (with one
micro-step: the loss by those of the batch). So the per-token weights carry that count as a
factor (`scale_for`), and the sum and the gradient come out as `sum(w * xent)`.

The patch, in `maxtext/trainers/pre_train/train.py`, two lines:
    data["loss_weights"] = scaled_weights(...)         # in train_step, before the batch is cut
    xent = xent * data["loss_weights"]                  # in loss_fn, for `targets_segmentation != 0`
The z-loss of the head follows the same line; `lm_loss` in the log must keep the plain sum.
"""

import types

import jax
import jax.numpy as jnp
from maxtext.common.common_types import ShardMode
from maxtext.utils import max_utils
from maxtext.utils.gradient_accumulation import gradient_accumulation_loss_and_grad

from eqx_loss import Granularity, Reductions, scale_for, token_weights

VOCAB, ROWS, POSITIONS = 11, 8, 6
DIVIDES_BY_TOKENS = Reductions(divides_by_tokens=True)


def scaled_weights(segmentation):
    """Weights of the whole global batch times the count that MaxText divides by."""
    mask = segmentation != 0
    factor = scale_for(DIVIDES_BY_TOKENS, num_tokens=int(mask.sum()))
    return factor * token_weights(mask, Granularity.SAMPLE)


def loss_fn(model, config, data, dropout_rng, params, is_train=True):
    """What is left of MaxText's `loss_fn` around the patched line, for a table of logits."""
    logits = params["table"][data["inputs"]]
    xent, _ = max_utils.cross_entropy_with_logits(logits, jax.nn.one_hot(data["targets"], VOCAB), 0.0)
    xent_sum = jnp.sum(xent * data["loss_weights"])  # was: xent * (targets_segmentation != 0)
    total_weights = jnp.sum(data["targets_segmentation"] != 0)
    nothing = {"moe_lb_loss": 0.0, "indexer_loss": 0.0, "mtp_loss": 0.0}
    return xent_sum, {"xent_sum": xent_sum, "total_weights": total_weights, **nothing}


def gradient(table, data, micro_steps):
    """Loss and gradient of one step by MaxText's own gradient accumulation."""
    config = types.SimpleNamespace(
        gradient_accumulation_steps=micro_steps, shard_optimizer_over_data=False, shard_mode=ShardMode.AUTO,
        debug_sharding=False,
    )  # fmt: skip
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    shardings = {"table": jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())}
    loss, _, grads = gradient_accumulation_loss_and_grad(
        loss_fn, config, None, {"table": table}, shardings, data, jax.random.key(0)
    )
    return loss, grads["table"]


def main():
    tokens = jax.random.randint(jax.random.key(0), (ROWS, POSITIONS + 1), 0, VOCAB)
    segmentation = (jnp.arange(POSITIONS) < jnp.array([6, 1, 3, 0, 5, 2, 4, 6])[:, None]).astype(int)
    data = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "targets_segmentation": segmentation}
    weights = token_weights(segmentation != 0, Granularity.SAMPLE)
    table = 0.1 * jax.random.normal(jax.random.key(1), (VOCAB, VOCAB))

    def wanted(table):
        log_probs = jax.nn.log_softmax(table[data["inputs"]])
        return -jnp.sum(weights * jnp.take_along_axis(log_probs, data["targets"][..., None], 2)[..., 0])

    data["loss_weights"] = scaled_weights(segmentation)
    value, whole = jax.value_and_grad(wanted)(table)
    for micro_steps in (1, 2, 4, 8):
        loss, grad = gradient(table, dict(data), micro_steps)
        assert jnp.allclose(loss, value, rtol=1e-5)
        assert jnp.allclose(grad, whole, rtol=1e-4, atol=1e-6)
    print(f"loss {value:.4f}, the same for 1, 2, 4 and 8 micro-steps")
    return float(value)


if __name__ == "__main__":
    main()
