"""Plain NumPy: the smallest complete answer to the core tier's main tasks."""

import pathlib
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from run import serve


def answer(case):
    given = case["inputs"]
    if case["task"] != "objective" or given["granularity"] not in ("token", "sample"):
        return {"skip": "only token and sample means"}
    mask = np.array(given["loss_mask"])
    logits = np.where(mask[..., None] > 0, np.array(given["logits"], dtype=float), 0)
    targets = np.where(mask > 0, given["targets"], 0)
    if given["granularity"] == "token":
        weights = mask / max(mask.sum(), 1)
    else:
        weights = mask / np.maximum(mask.sum(1, keepdims=True), 1) / len(mask)
    shifted = logits - logits.max(-1, keepdims=True)
    log_probs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    onehot = np.eye(logits.shape[-1])[targets]
    loss = (weights * -(log_probs * onehot).sum(-1)).sum()
    grad = weights[..., None] * (np.exp(log_probs) - onehot)
    return {"loss": loss, "num_tokens": int(mask.sum()), "grad_logits": grad.tolist()}


if __name__ == "__main__":
    serve(answer)
