"""Runs one setting through the installed megatron-core and writes a golden file.

    python -m tests.reference.megatron_run --setting lm_n4 --flag mb --out FOLDER

Runs in an environment with torch and megatron-core (extra `reference`; 0.17 and later import triton
as well); needs no JAX. CPU, float64,
one process per rank (gloo). Megatron's own code does: the schedule and its loss scaling, DDP,
`finalize_model_grads`, the router with its losses, the MTP loss, rolls and trackers. Ours are the
toy layers, the loss function of `pretrain_gpt.py` and the lm log of `training.py`, which are not
part of megatron-core.
"""

import argparse
import contextlib
import dataclasses
import functools
import inspect
import itertools
import json
import pathlib
import socket
import sys
import tempfile
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from .settings import ACTIVE, EXPERTS, HIDDEN, SETTINGS, Setting, batch, parameters

Job = tuple[Setting, bool]
Channels = dict[str, dict[str, Any]]


def main(arguments: list[str]) -> int:
    """Writes `FOLDER/NAME.FLAG.npz` for every setting and flag asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--setting", nargs="*", help="names; all when left out")
    parser.add_argument("--flag", choices=("mb", "pt"), nargs="*", default=["mb", "pt"])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    chosen = parser.parse_args(arguments)
    chosen.out.mkdir(parents=True, exist_ok=True)
    wanted = [s for s in SETTINGS if not chosen.setting or s.name in chosen.setting]
    unknown = set(chosen.setting or ()) - {s.name for s in SETTINGS}
    if unknown:
        parser.error(
            f"unknown setting {', '.join(sorted(unknown))}; known: {', '.join(s.name for s in SETTINGS)}"
        )
    failed = 0
    for size in sorted({(s.dp, s.cp) for s in wanted}):
        jobs = [(s, flag == "pt") for s in wanted if (s.dp, s.cp) == size for flag in chosen.flag]
        for (setting, per_token), ranks in zip(jobs, _run_ranks(jobs, *size)):
            name = f"{setting.name}.{'pt' if per_token else 'mb'}"
            if isinstance(ranks[0], str):
                failed += 1
                print(f"could not run {name}: {ranks[0]}", flush=True)
                continue
            write_case(setting, per_token, ranks, chosen.out / f"{name}.npz")
            print(f"wrote {name}", flush=True)
    return 1 if failed else 0


def write_case(setting: Setting, per_token: bool, ranks: list[Channels], path: pathlib.Path) -> None:
    """Writes the golden file of one setting from what its ranks returned."""
    import megatron.core

    config = {
        **dataclasses.asdict(setting),
        "per_token": per_token,
        "seq": len(setting.masks[0]),
        "batch": len(setting.masks),
        "topk": ACTIVE,
        "experts": EXPERTS,
        "score_function": "sigmoid",
    }
    arrays = batch(setting)
    if not _shows_padding():
        arrays.pop("padding_mask", None)
        config["padding"] = None
    totals = [rank["total"] for rank in ranks]
    arrays |= {f"param/{name}": value for name, value in parameters(setting).items()}
    for name in parameters(setting):
        arrays[f"grad/{name}"] = np.stack([ranks[0][c]["grads"][name] for c in setting.channels])
    arrays |= _gathered(setting, totals)
    meta = {
        "name": path.name.removesuffix(".npz"),
        "channels": list(setting.channels),
        "config": config,
        "logs": _spelled({name: [rank["logs"][name] for rank in totals] for name in totals[0]["logs"]}),
        "objective": {},
        "mcore": megatron.core.__version__,
        "label": megatron.core.__version__,
        "torch": torch.__version__,
    }
    np.savez(path, meta=json.dumps(meta), **arrays)


def _spelled(logs: dict[str, list[float]]) -> dict[str, list[float | str]]:
    return {k: [v if np.isfinite(v) else str(v) for v in values] for k, values in logs.items()}


def _gathered(setting: Setting, ranks: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Per-token cross-entropies and masks of the global batch from those of the ranks."""
    shape = setting.loss_mask().shape
    names = ranks[0]["tokens"]
    whole = {name: np.zeros(shape) for name in names}
    for rank in ranks:
        for name, pieces in rank["tokens"].items():
            for rows, places, values in pieces:
                for i, row in enumerate(rows):
                    whole[name][row, places[i]] = values[i]
    return whole


def _run_ranks(jobs: list[Job], dp: int, cp: int) -> Iterator[list[Any]]:
    """What every rank returned for each job, or what went wrong as text."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank_main, args=(jobs, cp, port, dp * cp, folder), nprocs=dp * cp)
        ranks = [torch.load(f"{folder}/{r}.pt", weights_only=False) for r in range(dp * cp)]
    return iter([list(results) for results in zip(*ranks)])


def _rank_main(rank: int, jobs: list[Job], cp: int, port: int, world_size: int, folder: str) -> None:
    torch.set_num_threads(1)
    _pretend_cuda()
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size
    )
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(context_parallel_size=cp)
    results: list[Any] = []
    for setting, per_token in jobs:
        try:
            results.append({c: train_step(setting, per_token, c) for c in setting.channels})
        except Exception as error:
            # A release that lacks a feature must not stop the other settings.
            where = traceback.extract_tb(error.__traceback__)[-1]
            results.append(
                f"{type(error).__name__}: {error} ({pathlib.Path(where.filename).name}:{where.lineno})"
            )
    torch.save(results, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def _pretend_cuda() -> None:
    """Megatron-Core names the device `cuda` in places; here that is the CPU, and floats are float64."""
    cpu = torch.device("cpu")
    torch.set_default_dtype(torch.float64)
    torch.float = torch.float32 = torch.float64  # pyright: ignore
    stream = types.SimpleNamespace(device=cpu, wait_stream=lambda *_: None, synchronize=lambda: None)
    torch.cuda.current_stream = lambda *_: stream  # pyright: ignore
    torch.cuda.current_device = lambda: cpu  # pyright: ignore
    torch.Tensor.float = torch.Tensor.double  # pyright: ignore
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # pyright: ignore

    def on_cpu(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(make)
        def wrapped(*args: Any, **kwargs: Any) -> torch.Tensor:
            if kwargs.get("device") is not None and str(kwargs["device"]).startswith("cuda"):
                kwargs["device"] = cpu
            return make(*args, **kwargs)

        return wrapped

    for name in ("zeros", "ones", "empty", "tensor", "full"):
        setattr(torch, name, on_cpu(getattr(torch, name)))


class ToyModel(torch.nn.Module):
    """The toy model on one rank; MTP loss, router and their losses are Megatron's."""

    def __init__(self, config: Any, setting: Setting, channel: str) -> None:
        super().__init__()
        from megatron.core.enums import ModelType

        self.config = config
        self.model_type = ModelType.encoder_or_decoder
        self.setting = setting
        self.channel = channel
        self.tokens: dict[str, list[Any]] = {}
        for name, value in parameters(setting).items():
            if not name.endswith(".router"):
                tensor = torch.tensor(value, dtype=torch.float64)
                self.register_parameter(name.replace(".", "_"), torch.nn.Parameter(tensor))
        self.routers = torch.nn.ModuleDict()
        if setting.moe:
            for index in range(setting.num_layers):
                self.routers[f"dec{index}"] = _router(config, setting, f"dec{index}", index + 1, False)
            for index in range(setting.mtp_layers):
                self.routers[f"mtp{index}"] = _router(config, setting, f"mtp{index}", index + 1, True)

    def set_input_tensor(self, tensor: Any) -> None:
        """Part of the schedule's protocol; there is one pipeline stage."""

    def forward(self, micro: dict[str, Any]) -> torch.Tensor:
        """Per-token cross-entropy `[b, s]`, the MTP loss attached."""
        from megatron.core.transformer import multi_token_prediction as mtp

        hidden = self.embed[micro["tokens"]].transpose(0, 1).contiguous()
        padding = micro["padding"]
        for index in range(self.setting.num_layers):
            hidden = self._layer(f"dec{index}", hidden, padding)
        if not self.setting.mtp_layers:
            return self._cross_entropy(micro["labels"], self._logits(hidden)[0], micro, "ce0")
        states, tokens = [hidden], micro["tokens"]
        roll = functools.partial(_roll, mtp, micro=micro)
        for index in range(self.setting.mtp_layers):
            tokens = roll(tokens)
            if padding is not None:
                padding = _mtp_padding(mtp, padding, micro)
            both = torch.cat([self.embed[tokens].transpose(0, 1), states[-1]], dim=-1)
            states.append(self._layer(f"mtp{index}", both @ getattr(self, f"mtp{index}_proj").T, padding))
        if self.channel in ("total", "mtp"):
            hidden = _mtp_loss(self, mtp, states, micro)
        else:  # the MTP routers still take part; a scale of 0 would not do, Megatron has 0 / 0 there
            hidden = states[0] + sum(0.0 * state for state in states[1:])
        _record_mtp(self, states, roll, micro)
        return self._cross_entropy(micro["labels"], self._logits(hidden)[0], micro, "ce0")

    def _layer(self, name: str, hidden: torch.Tensor, padding: torch.Tensor | None) -> torch.Tensor:
        hidden = hidden + torch.tanh(hidden @ getattr(self, f"{name}_w").T)
        if not self.setting.moe:
            return hidden
        router = self.routers[name]
        shown = padding is not None and _shows_padding()
        mask = {"padding_mask": padding.transpose(0, 1).contiguous()} if shown else {}
        probs, _ = router(hidden, **mask)
        return hidden + (probs @ getattr(self, f"{name}_experts")).view(hidden.shape)

    def _logits(self, hidden: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        return hidden @ self.out.T, None

    def _cross_entropy(
        self, labels: torch.Tensor, logits: torch.Tensor, micro: dict[str, Any] | None = None, name: str = ""
    ) -> torch.Tensor:
        flat = torch.nn.functional.cross_entropy(
            logits.transpose(0, 1).reshape(-1, logits.shape[-1]), labels.reshape(-1), reduction="none"
        )
        loss = flat.view(labels.shape)
        if micro is not None:
            self.record(name, loss, micro)
        return loss

    def record(self, name: str, values: torch.Tensor, micro: dict[str, Any]) -> None:
        """Keeps per-token values for the golden file."""
        piece = (micro["rows"], micro["places"], values.detach().numpy())
        self.tokens.setdefault(name, []).append(piece)


def _router(config: Any, setting: Setting, name: str, number: int, is_mtp: bool) -> torch.nn.Module:
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe.router import TopKRouter

    if not hasattr(moe_utils, "te_general_gemm"):  # 0.16 forgets to define it without Transformer Engine
        moe_utils.te_general_gemm = None
    accepted = inspect.signature(TopKRouter.__init__).parameters
    groups: dict[str, Any] = {}
    for key in ("pg_collection", "model_comm_pgs"):
        if key in accepted:
            groups[key] = _process_groups()
    router = TopKRouter(config=config, **groups)
    router.weight = torch.nn.Parameter(
        torch.tensor(parameters(setting)[f"{name}.router"], dtype=torch.float64)
    )
    if hasattr(router, "is_mtp_layer"):
        router.is_mtp_layer = is_mtp
    elif is_mtp:
        number = number + setting.num_layers if _counts_mtp_layers() else 1
    router.set_layer_number(number)
    return router


def _shows_padding() -> bool:
    """False before 0.16: routers take no padding mask."""
    from megatron.core.transformer.moe.router import TopKRouter

    return "padding_mask" in inspect.signature(TopKRouter.forward).parameters


def _counts_mtp_layers() -> bool:
    """0.12 writes MTP layers into the slot of layer 1."""
    import megatron.core

    return not megatron.core.__version__.startswith("0.12")


def _process_groups() -> Any:
    from megatron.core import parallel_state as state

    return types.SimpleNamespace(
        tp=state.get_tensor_model_parallel_group(),
        cp=state.get_context_parallel_group(),
        tp_cp=state.get_tensor_and_context_parallel_group(),
        tp_dp_cp=state.get_tensor_and_data_parallel_group(with_context_parallel=True),
    )


def _roll(mtp: Any, values: torch.Tensor, *, micro: dict[str, Any]) -> torch.Tensor:
    from megatron.core import parallel_state

    accepted = inspect.signature(mtp.roll_tensor).parameters
    options: dict[str, Any] = {}
    if "cp_group" in accepted:
        options["cp_group"] = parallel_state.get_context_parallel_group()
    if "packed_seq_params" in accepted:
        options["packed_seq_params"] = micro["packed"]
    return mtp.roll_tensor(values, shifts=-1, dims=-1, **options)[0]


def _mtp_padding(mtp: Any, padding: torch.Tensor, micro: dict[str, Any]) -> torch.Tensor | None:
    """MTP layers see a padding mask where the release passes it on."""
    embeddings = getattr(mtp.MultiTokenPredictionLayer, "_get_embeddings", None)
    if embeddings is None or "padding_mask" not in inspect.signature(embeddings).parameters:
        return None
    return _roll(mtp, padding, micro=micro)


def _mtp_loss(model: ToyModel, mtp: Any, states: list[torch.Tensor], micro: dict[str, Any]) -> torch.Tensor:
    """The decoder's output with Megatron's MTP loss attached."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_model import GPTModel

    joined = torch.cat(states, dim=0)
    cp_group = parallel_state.get_context_parallel_group()
    common: dict[str, Any] = {
        "hidden_states": joined,
        "labels": micro["labels"],
        "loss_mask": micro["loss_mask"],
        "packed_seq_params": micro["packed"],
    }
    if hasattr(mtp, "process_mtp_loss"):
        options = common | {
            "output_layer": model._logits,
            "output_weight": None,
            "runtime_gather_output": None,
            "is_training": True,
            "compute_language_model_loss": model._cross_entropy,
            "config": model.config,
            "cp_group": cp_group,
            "tp_group": parallel_state.get_tensor_model_parallel_group(),
        }
        options["output_layer"] = _output_layer(model)
        accepted = inspect.signature(mtp.process_mtp_loss).parameters
        return mtp.process_mtp_loss(**{k: v for k, v in options.items() if k in accepted})
    if "labels" not in inspect.signature(mtp.MultiTokenPredictionBlock.forward).parameters:
        return _through_postprocess(GPTModel, model, common, cp_group)
    return _through_block(mtp, model, states, micro)


def _output_layer(model: ToyModel) -> Any:
    """A callable with the attributes of Megatron's output layer."""
    layer = types.SimpleNamespace(weight=model.out, sequence_parallel=False)

    class Layer:
        weight = layer.weight
        sequence_parallel = False

        def __call__(self, hidden: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
            return model._logits(hidden)

    return Layer()


def _through_postprocess(owner: Any, model: ToyModel, common: dict[str, Any], cp_group: Any) -> torch.Tensor:
    """0.14 to 0.16: `GPTModel._postprocess`, caught at its last call of the output layer."""
    caught: list[torch.Tensor] = []

    class Layer:
        sequence_parallel = False

        def __call__(self, hidden: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
            caught.append(hidden)
            return model._logits(hidden)

    fake = types.SimpleNamespace(
        config=model.config,
        training=True,
        post_process=True,
        mtp_process=True,
        share_embeddings_and_output_weights=False,
        output_layer=Layer(),
        cp_group=cp_group,
        compute_language_model_loss=model._cross_entropy,
    )
    accepted = inspect.signature(owner._postprocess).parameters
    options = common | {
        "input_ids": None,
        "position_ids": None,
        "rotary_pos_emb": None,
        "rotary_pos_cos": None,
        "rotary_pos_sin": None,
        "mtp_in_postprocess": False,
    }
    owner._postprocess(fake, **{k: v for k, v in options.items() if k in accepted})
    return caught[-1]


def _through_block(
    mtp: Any, model: ToyModel, states: list[torch.Tensor], micro: dict[str, Any]
) -> torch.Tensor:
    """0.12 and 0.13: the loss is in `MultiTokenPredictionBlock.forward`."""
    fake = types.SimpleNamespace(
        layers=[lambda state=state, **_: state for state in states[1:]],
        config=model.config,
        training=True,
        mtp_loss_scaling_factor=model.config.mtp_loss_scaling_factor,
    )
    return mtp.MultiTokenPredictionBlock.forward(
        fake,
        input_ids=micro["tokens"],
        position_ids=micro["tokens"],
        hidden_states=states[0],
        attention_mask=None,
        labels=micro["labels"],
        loss_mask=micro["loss_mask"],
        embedding=lambda **_: None,
        output_layer=model._logits,
        output_weight=None,
        compute_language_model_loss=model._cross_entropy,
    )


def _record_mtp(model: ToyModel, states: list[torch.Tensor], roll: Any, micro: dict[str, Any]) -> None:
    labels, mask = micro["labels"], micro["loss_mask"]
    for depth, state in enumerate(states[1:], 1):
        labels, mask = roll(labels), roll(mask)
        model._cross_entropy(labels, model._logits(state)[0], micro, f"ce{depth}")
        model.record(f"mask{depth}", mask, micro)


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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
