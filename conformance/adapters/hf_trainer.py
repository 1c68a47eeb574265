"""Hugging Face Trainer's loss as the Trainer calls it: `num_items_in_batch` over steps and ranks."""

import pathlib
import sys

import torch
from transformers.loss.loss_utils import ForCausalLMLoss

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from run import serve


def answer(case):
    given = case["inputs"]
    if case["task"] == "next_token":
        logits, labels = torch.tensor(given["logits"]), torch.tensor(given["labels"])
        count = (labels[:, 1:] != -100).sum()
        loss = ForCausalLMLoss(logits, labels, logits.shape[-1], num_items_in_batch=count)
        return {"outputs": {"loss": loss.item(), "num_tokens": int(count)}, "dtype": "float32"}
    if case["task"] != "objective" or given["granularity"] != "token":
        return {"skip": "token means and the label shift only"}
    mask = torch.tensor(given["loss_mask"]) > 0
    values = [[[float(x) for x in token] for token in row] for row in given["logits"]]
    logits = torch.tensor(values, requires_grad=True)
    labels = torch.where(mask, torch.tensor(given["targets"]), -100)
    loss = 0.0
    for rows in (rows for step in given["schedule"] for rows in step):
        part = ForCausalLMLoss(
            logits[rows], None, logits.shape[-1], num_items_in_batch=mask.sum(), shift_labels=labels[rows]
        )
        part.backward()  # DDP's mean and the Trainer's factor num_processes cancel
        loss += part.item()
    return {
        "outputs": {"loss": loss, "num_tokens": int(mask.sum()), "grad_logits": logits.grad.tolist()},
        "dtype": "float32",
    }


if __name__ == "__main__":
    serve(answer)
