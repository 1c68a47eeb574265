"""MaxText: its cross-entropy and the division of its gradient accumulation, one micro-step a cell."""

import pathlib
import sys

import jax
import jax.numpy as jnp
from maxtext.utils import max_utils

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from run import serve


def answer(case):
    given = case["inputs"]
    if case["task"] != "objective" or given["granularity"] != "token":
        return {"skip": "token means only"}
    targets, weights = jnp.array(given["targets"]), jnp.array(given["loss_mask"])
    logits = jnp.array([[[float(x) for x in token] for token in row] for row in given["logits"]])

    def xent_sum(logits, rows):  # trainers/pre_train/train.py, loss_fn with gradient accumulation
        onehot = jax.nn.one_hot(targets[rows], logits.shape[-1])
        xent, _ = max_utils.cross_entropy_with_logits(logits[rows], onehot, 0.0)
        return jnp.sum(xent * (weights[rows] != 0))

    loss, grad, total = 0.0, jnp.zeros_like(logits), jnp.maximum(weights.sum(), 1)
    for rows in (jnp.array(rows) for step in given["schedule"] for rows in step):
        part, part_grad = jax.value_and_grad(xent_sum)(logits, rows)
        loss, grad = loss + part / total, grad + part_grad / total
    return {
        "outputs": {"loss": float(loss), "num_tokens": int(weights.sum()), "grad_logits": grad.tolist()},
        "dtype": "float32",
    }


if __name__ == "__main__":
    serve(answer)
