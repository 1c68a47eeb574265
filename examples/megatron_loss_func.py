"""Megatron-core: any normalization through `loss_func`, here per document, which Megatron lacks.

With `calculate_per_token_loss=False` Megatron divides a micro-batch's loss by the `num_tokens` it
returns and by the micro-batches, and averages gradients over data and context ranks. So
`loss_func` returns `sum(w * loss)` times `scale_for` and a `num_tokens` of 1.

What `loss_func` logs stays the plain (sum, count), as in pretrain_gpt.py.
"""

import types

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.schedules import forward_step_calc_loss
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

from eqx_loss.numpy import Reductions, scale_for, token_weights


def loss_func(weights, scale, loss_mask, output_tensor):
    """Megatron's `loss_func`, bound with `functools.partial(loss_func, weights, scale, loss_mask)`."""
    losses = output_tensor.view(-1).float()
    loss = scale * torch.sum(losses * weights.view(-1))
    logged = torch.stack([torch.sum(losses * loss_mask.view(-1)), loss_mask.sum()]).detach()
    return loss, torch.ones((), dtype=torch.int), {"lm loss": logged}


def step_gradient(logits, labels, loss_mask, weights, num_micro_batches, num_ranks):
    """Gradient after Megatron's division and its average over ranks, one micro-batch a row."""
    config = types.SimpleNamespace(calculate_per_token_loss=False, timers=None)
    reductions = Reductions.megatron(
        calculate_per_token_loss=False, data_ranks=num_ranks, micro_steps=num_micro_batches
    )
    scale = scale_for(reductions)
    for row in range(len(labels)):
        losses = vocab_parallel_cross_entropy(logits[row : row + 1].clone(), labels[row : row + 1])
        reduced = loss_func(weights[row], scale, loss_mask[row], losses)
        part, _ = forward_step_calc_loss(
            None,
            None,
            lambda _, reduced=reduced: reduced,
            config,
            None,
            False,
            num_micro_batches,
            [],
            1,
            True,
        )
        (part / num_ranks).backward()  # DDP averages over the ranks
    return logits.grad


def main():
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
        )
        parallel_state.initialize_model_parallel()
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(8, 6, 11, generator=generator)
    labels = torch.randint(11, (8, 6), generator=generator)
    segments = np.array([[1, 1, 1, 2, 2, 2], [1, 2, 2, 2, 2, 0]] * 4)
    mask = segments > 0
    weights = torch.from_numpy(token_weights(mask, "document", segment_ids=segments)).float()
    wanted = logits.clone().requires_grad_()
    losses = torch.nn.functional.cross_entropy(wanted.flatten(0, 1), labels.flatten(), reduction="none")
    torch.sum(losses * weights.flatten()).backward()
    for num_micro_batches, num_ranks in ((8, 1), (4, 2), (1, 8)):
        given = logits.clone().requires_grad_()
        found = step_gradient(
            given, labels, torch.from_numpy(mask).float(), weights, num_micro_batches, num_ranks
        )
        torch.testing.assert_close(found, wanted.grad, rtol=1e-5, atol=1e-7)
    print("per-document gradients, the same for 8x1, 4x2 and 1x8 micro-batches and ranks")


if __name__ == "__main__":
    main()
