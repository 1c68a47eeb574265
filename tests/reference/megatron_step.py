"""One training step through Megatron's schedule, DDP and `finalize_model_grads`, and its logs.

Ours are the loss function of `pretrain_gpt.py` and the lm log of `training.py`, which are not part of
megatron-core.
"""

import contextlib
import functools
import inspect
import itertools
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from .megatron_model import ToyModel
from .settings import ACTIVE, EXPERTS, HIDDEN, Setting, batch, parameters


def train_step(setting: Setting, per_token: bool, channel: str) -> dict[str, Any]:
    """One step on this rank: gradients after `finalize_model_grads`, printed logs, per-token values."""
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.pipeline_parallel import get_forward_backward_func

    _clear_trackers()
    config = _config(setting, per_token, channel)
    config.finalize_model_grads_func = finalize_model_grads
    model = DistributedDataParallel(
        config, DistributedDataParallelConfig(grad_reduce_in_fp32=False), ToyModel(config, setting, channel)
    )
    model.zero_grad_buffer()
    losses = get_forward_backward_func()(
        forward_step_func=functools.partial(_forward_step, channel=channel, per_token=per_token),
        data_iterator=_micro_batches(setting),
        model=[model],
        num_microbatches=setting.num_microbatches,
        seq_length=len(setting.masks[0]),
        micro_batch_size=setting.micro_batch_size,
        forward_only=False,
    )
    pairs = torch.stack([loss["lm loss"] for loss in losses]).sum(0)
    torch.distributed.all_reduce(
        pairs, group=parallel_state.get_data_parallel_group(with_context_parallel=True)
    )
    toy = model.module
    named = {n.replace("routers.", "").replace(".weight", ".router"): p for n, p in toy.named_parameters()}
    grads = {}
    for name in parameters(setting):
        key = name if name.endswith(".router") else name.replace(".", "_")
        grads[name] = named[key].main_grad.numpy().copy()
    logs = {"lm loss": float(pairs[0] / pairs[1]), **_side_logs(setting, channel)}
    return {"grads": grads, "logs": logs, "tokens": toy.tokens}


def _clear_trackers() -> None:
    """Megatron keeps logs in module globals; nothing of the run before may stay."""
    from megatron.core import parallel_state
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    MTPLossLoggingHelper.tracker.clear()
    for name in ("get_moe_metrics_tracker", "get_moe_layer_wise_logging_tracker"):
        for owner in (moe_utils, parallel_state):
            if hasattr(owner, name):
                tracker = getattr(owner, name)()
                (tracker if isinstance(tracker, dict) else tracker._metrics).clear()


def _config(setting: Setting, per_token: bool, channel: str) -> Any:
    from megatron.core.transformer import TransformerConfig

    aux = setting.aux if channel in ("total", "aux") else ()
    types_, factors = [name for name, _ in aux], [value for _, value in aux]
    moe: dict[str, Any] = {}
    if setting.moe:
        single = len(aux) == 1
        moe = {
            "num_moe_experts": EXPERTS,
            "moe_router_topk": ACTIVE,
            "moe_router_score_function": "sigmoid",
            "moe_router_dtype": "fp64",
            "moe_router_load_balancing_type": "none" if not aux else types_[0] if single else types_,
            "moe_aux_loss_coeff": 0.0 if not aux else factors[0] if single else factors,
            "moe_z_loss_coeff": setting.z_coeff if channel in ("total", "z") else None,
        }
    if setting.mtp_layers:
        moe |= {"mtp_num_layers": setting.mtp_layers, "mtp_loss_scaling_factor": setting.mtp_scale}
    return TransformerConfig(
        num_layers=setting.num_layers,
        hidden_size=HIDDEN,
        num_attention_heads=1,
        calculate_per_token_loss=per_token,
        context_parallel_size=setting.cp,
        params_dtype=torch.float64,
        add_bias_linear=False,
        perform_initialization=False,
        use_cpu_initialization=True,
        **moe,
    )


def _micro_batches(setting: Setting) -> Iterator[dict[str, Any]]:
    from megatron.core import parallel_state

    rank, context = parallel_state.get_data_parallel_rank(), parallel_state.get_context_parallel_rank()
    arrays = batch(setting)
    for rows in arrays["order"][:, rank]:
        places = np.stack([context_positions(setting, row, context) for row in rows])
        taken = {
            name: torch.tensor(np.take_along_axis(arrays[name][rows], places, axis=1))
            for name in ("tokens", "labels", "loss_mask", "padding_mask")
            if name in arrays
        }
        yield {
            "rows": rows,
            "places": places,
            "tokens": taken["tokens"],
            "labels": taken["labels"],
            "loss_mask": taken["loss_mask"],
            "padding": taken.get("padding_mask"),
            "packed": _packed(setting, int(rows[0])),
        }


def context_positions(setting: Setting, row: int, context: int) -> np.ndarray:
    """Positions of a row that a context rank holds; every document is cut for itself."""
    bounds = (0, len(setting.masks[0])) if setting.cu_seqlens is None else setting.cu_seqlens[row]
    kept = []
    for start, end in itertools.pairwise(bounds):
        pieces = (
            np.split(np.arange(start, end), 2 * setting.cp) if setting.cp > 1 else [np.arange(start, end)]
        )
        mine = [pieces[context], pieces[-1 - context]] if setting.cp > 1 else pieces
        kept.append(np.concatenate(mine))
    return np.concatenate(kept)


def _packed(setting: Setting, row: int) -> Any:
    if setting.cu_seqlens is None:
        return None
    from megatron.core.packed_seq_params import PackedSeqParams

    bounds = torch.tensor(setting.cu_seqlens[row], dtype=torch.int32)
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)


def _forward_step(
    data: Iterator[dict[str, Any]], model: Any, *, channel: str, per_token: bool
) -> tuple[torch.Tensor, Any]:
    micro = next(data)
    return model(micro), functools.partial(_loss_func, micro["loss_mask"], channel, per_token)


def _loss_func(
    mask: torch.Tensor, channel: str, per_token: bool, losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """`loss_func` of `pretrain_gpt.py`; 0 times the loss when another channel is wanted."""
    import megatron.core
    from megatron.core import parallel_state

    loss, total = torch.sum(losses.view(-1) * mask.view(-1)), mask.sum()
    local = torch.cat([loss.detach().view(1), total.detach().to(torch.int).to(total.dtype).view(1)])
    if megatron.core.__version__.startswith("0.12") and parallel_state.get_context_parallel_world_size() > 1:
        both = torch.cat([loss.view(1), total.view(1)])
        torch.distributed.all_reduce(both, group=parallel_state.get_context_parallel_group())
        loss, total = both[0].clone(), both[1]
    num_tokens = total.clone().detach().to(torch.int)
    if channel in ("total", "lm"):
        return loss, num_tokens, {"lm loss": local}
    if not per_token:  # before 0.15 the schedule has 0 / 0 here, which must not reach another channel
        num_tokens = num_tokens.clamp(min=1)
    return loss * 0.0, num_tokens, {"lm loss": local}


def _side_logs(setting: Setting, channel: str) -> dict[str, float]:
    """MTP and MoE logs as `training_log` prints them."""
    scale = 1 / setting.num_microbatches
    printed: dict[str, torch.Tensor] = {}
    with contextlib.redirect_stdout(sys.stderr):
        if setting.mtp_layers and channel in ("total", "mtp"):
            from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

            MTPLossLoggingHelper.track_mtp_metrics(scale, 0, None, total_loss_dict=printed)
        if setting.moe and channel == "total":
            _track_moe(setting, scale, printed)
    return {name: float(value) for name, value in printed.items() if name.endswith("loss")}


def _track_moe(setting: Setting, scale: float, printed: dict[str, torch.Tensor]) -> None:
    from megatron.core.transformer.moe import moe_utils

    class Writer:
        def add_scalar(self, *_: Any) -> None:
            """0.12 and 0.13 fill the dictionary only when there is a writer."""

    accepted = inspect.signature(moe_utils.track_moe_metrics).parameters
    options: dict[str, Any] = {
        "writer": Writer(),
        "total_loss_dict": printed,
        "num_layers": setting.num_layers,
        "mtp_num_layers": setting.mtp_layers or None,
    }
    moe_utils.track_moe_metrics(scale, 0, **{k: v for k, v in options.items() if k in accepted})
