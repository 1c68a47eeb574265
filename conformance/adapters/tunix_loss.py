"""tunix: the default loss of its PeftTrainer, with optax.MultiSteps' mean over micro-steps."""

import pathlib
import sys

import jax
import jax.numpy as jnp
from tunix.sft.peft_trainer import _default_loss_fn

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from run import serve


def answer(case):
    given = case["inputs"]
    if case["task"] != "objective" or given["granularity"] != "token":
        return {"skip": "token means only"}
    # tunix shifts: put the targets one position later and add a position at the end.
    targets = jnp.pad(jnp.array(given["targets"]), ((0, 0), (1, 0)))
    mask = jnp.pad(jnp.array(given["loss_mask"]), ((0, 0), (1, 0)))
    logits = jnp.array([[[float(x) for x in token] for token in row] for row in given["logits"]])

    def objective(logits, rows):
        padded = jnp.pad(logits[rows], ((0, 0), (0, 1), (0, 0)))
        return _default_loss_fn(lambda *_: (padded, None), targets[rows], mask[rows], None, None)

    loss, grad, steps = 0.0, jnp.zeros_like(logits), given["schedule"]
    for step in steps:  # the ranks of one step are one sharded array
        rows = jnp.array([row for rows in step for row in rows])
        part, part_grad = jax.value_and_grad(objective)(logits, rows)
        loss, grad = loss + part / len(steps), grad + part_grad / len(steps)
    return {
        "outputs": {"loss": float(loss), "num_tokens": int(mask.sum()), "grad_logits": grad.tolist()},
        "dtype": "float32",
    }


if __name__ == "__main__":
    serve(answer)
