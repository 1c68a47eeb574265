"""PyTorch's own cross-entropy: a sum over the schedule's cells, divided by the global count."""

import pathlib
import sys

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from run import serve


def answer(case):
    given = case["inputs"]
    if case["task"] != "objective" or given["granularity"] != "token":
        return {"skip": "token means only"}
    mask = torch.tensor(given["loss_mask"]) > 0
    values = [[[float(x) for x in token] for token in row] for row in given["logits"]]
    logits = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    # Select before the softmax: ignore_index alone still sends NaN back through it.
    used = torch.where(mask[..., None], logits, 0.0)
    labels = torch.where(mask, torch.tensor(given["targets"]), -100)
    for rows in (rows for step in given["schedule"] for rows in step):
        total = torch.nn.functional.cross_entropy(
            used[rows].flatten(0, 1), labels[rows].flatten(), reduction="sum"
        )
        (total / mask.sum().clamp(min=1)).backward(retain_graph=True)
    loss = torch.nn.functional.cross_entropy(used.flatten(0, 1), labels.flatten(), reduction="sum")
    loss = loss.item() / max(int(mask.sum()), 1)
    return {"loss": loss, "num_tokens": int(mask.sum()), "grad_logits": logits.grad.tolist()}


if __name__ == "__main__":
    serve(answer)
