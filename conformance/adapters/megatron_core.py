"""megatron-core: its vocabulary-parallel cross-entropy, pretrain_gpt's loss_func, its schedule's division."""

import pathlib
import sys
import types

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.schedules import forward_step_calc_loss
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from run import serve


def answer(case):
    given = case["inputs"]
    if case["task"] != "objective" or given["granularity"] == "document":
        return {"skip": "Megatron's two normalizations only"}
    start()
    per_token = given["granularity"] == "token"
    config = types.SimpleNamespace(calculate_per_token_loss=per_token, timers=None)
    mask = torch.tensor(given["loss_mask"])
    values = [[[float(x) for x in token] for token in row] for row in given["logits"]]
    logits = torch.tensor(values, requires_grad=True)
    targets = torch.where(mask > 0, torch.tensor(given["targets"]), 0)
    loss, num_ranks = 0.0, len(given["schedule"][0])
    for rows in (rows for step in given["schedule"] for rows in step):
        # pretrain_gpt.py, loss_func: (sum of losses, number of tokens, what is logged)
        losses = vocab_parallel_cross_entropy(logits[rows].clone(), targets[rows]) * mask[rows]
        reduced = (losses.sum(), mask[rows].sum().int(), {})
        part, _ = forward_step_calc_loss(
            None,
            None,
            lambda _, reduced=reduced: reduced,
            config,
            None,
            False,
            len(given["schedule"]),
            [],
            1,
            True,
        )
        # =False: gradients are averaged over ranks; =True: summed, then divided by the global count.
        part = part / mask.sum().clamp(min=1) if per_token else part / num_ranks
        part.backward()
        loss += part.item()
    outputs = {"loss": loss, "num_tokens": int(mask.sum()), "grad_logits": logits.grad.tolist()}
    return {"outputs": outputs, "dtype": "float32"}


def start():
    if not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        parallel_state.initialize_model_parallel()


if __name__ == "__main__":
    serve(answer)
