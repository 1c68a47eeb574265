"""torchtitan's CrossEntropyLoss as its trainer calls it: `global_valid_tokens` over steps and ranks."""

import pathlib
import sys

import torch
from torchtitan.components.loss import IGNORE_INDEX, CrossEntropyLoss

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from run import serve


def answer(case):
    given = case["inputs"]
    if case["task"] != "objective" or given["granularity"] != "token":
        return {"skip": "token means only"}
    loss_fn = CrossEntropyLoss(CrossEntropyLoss.Config())
    mask = torch.tensor(given["loss_mask"]) > 0
    values = [[[float(x) for x in token] for token in row] for row in given["logits"]]
    logits = torch.tensor(values, requires_grad=True)
    labels = torch.where(mask, torch.tensor(given["targets"]), IGNORE_INDEX)
    loss = 0.0
    for rows in (rows for step in given["schedule"] for rows in step):
        part, _ = loss_fn(logits[rows], labels[rows], global_valid_tokens=mask.sum())
        part.backward()
        loss += part.item()
    return {
        "outputs": {"loss": loss, "num_tokens": int(mask.sum()), "grad_logits": logits.grad.tolist()},
        "dtype": "float32",
    }


if __name__ == "__main__":
    serve(answer)
