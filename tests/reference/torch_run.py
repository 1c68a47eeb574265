"""Trains the toy Ling-3 of `pair_settings` with PyTorch and writes a log in Megatron's format.

    python -m tests.reference.torch_run --flag pt mb --out FOLDER

Runs in an environment with torch and transformers; needs no JAX. The layers are those of transformers
(`bailing_hybrid`, `MtpLayer`), float32, eager. The documents of a row are sequences of their own: nothing of the
packing here can leak. The loss rules are Megatron-Core 0.16's, written out here: `pretrain_gpt.py` (`loss_func`),
`pipeline_parallel/schedules.py` (`forward_step_calc_loss`), `distributed/finalize_model_grads.py`,
`transformer/multi_token_prediction.py`, `transformer/moe/moe_utils.py` (`z_loss_func`) and `router.py`; with
`packed_seq_params`, so that MTP stops at document ends, and with padding out of the routers' sight.
"""

import argparse
import json
import pathlib
import sys
import time
from collections.abc import Iterator

import numpy as np
import torch
import transformers
from safetensors.torch import load_file
from transformers.modeling_layers import MtpLayer
from transformers.models.bailing_hybrid import configuration_bailing_hybrid as configuration
from transformers.models.bailing_hybrid import modeling_bailing_hybrid as modeling

from . import pair_settings as settings


def main(arguments: list[str]) -> int:
    """Writes `FOLDER/torch.FLAG.log` for every flag asked for, and `FOLDER/made_with.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--flag", choices=tuple(settings.FLAGS), nargs="*", default=list(settings.FLAGS))
    parser.add_argument("--weights", type=pathlib.Path, default=settings.WEIGHTS)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--steps", type=int, default=settings.NUM_STEPS, help="leading steps to train")
    chosen = parser.parse_args(arguments)
    chosen.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for flag in chosen.flag:
        with (chosen.out / f"torch.{flag}.log").open("w", encoding="utf-8") as file:
            for line in train(chosen.weights, settings.FLAGS[flag], chosen.steps):
                print(line, file=file, flush=True)
        print(f"wrote torch.{flag}.log", flush=True)
    facts = {
        "command": "python -m tests.reference.torch_run --out tests/golden/train_pair",
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
        "seed": settings.SEED,
    }
    (chosen.out / "made_with.json").write_text(json.dumps(facts, indent=1) + "\n")
    return 0


class Ling(torch.nn.Module):
    """The stock model with its MTP layers, loaded from a checkpoint folder."""

    def __init__(self, folder: pathlib.Path) -> None:
        super().__init__()
        options = {"attn_implementation": "eager", "experts_implementation": "eager"}
        self.main = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
        config = self.main.config
        depths = config.num_mtp_layers
        mtp_config = configuration.BailingHybridConfig.from_dict(
            config.to_dict()
            | {
                "num_hidden_layers": depths,
                "layer_types": ["full_attention"] * depths,
                "mlp_layer_types": ["sparse"] * depths,
            }
        )
        mtp_config._attn_implementation = mtp_config._experts_implementation = "eager"
        self.mtp = torch.nn.ModuleList(
            MtpLayer(mtp_config, modeling.BailingHybridDecoderLayer, modeling.BailingHybridRMSNorm, k)
            for k in range(depths)
        )
        stored = load_file(folder / "model.safetensors")
        for k, layer in enumerate(self.mtp):
            prefix = f"model.layers.{config.num_hidden_layers + k}."
            names = {n.removeprefix(prefix): t for n, t in stored.items() if n.startswith(prefix)}
            layer.load_state_dict(mtp_state(names, config.num_local_experts))
        self.routers = [m for m in self.modules() if isinstance(m, modeling.BailingHybridTopkRouter)]

    def forward(self, ids: torch.Tensor) -> tuple[list[torch.Tensor], list[tuple[torch.Tensor, ...]]]:
        """Logits `[n, S, V]` of the main head and each depth; router logits and chosen experts of each router.

        Args:
            ids: `[n, S]`, a document a row. What follows a document changes nothing before it: all layers are causal.
        """
        seen: list[tuple[torch.Tensor, ...]] = []
        hooks = [
            r.register_forward_hook(lambda _m, _i, out: seen.append((out[0], out[2]))) for r in self.routers
        ]
        output = self.main(ids, output_hidden_states=True, use_cache=False)
        hidden, logits = output.hidden_states[-1], [output.logits]
        length = ids.shape[1]
        causal = torch.full((length, length), float("-inf")).triu(1)[None, None]
        positions = torch.arange(length)[None]
        rotary = self.main.model.rotary_emb(hidden, positions)
        for layer in self.mtp:
            ids = rolled(ids)  # beyond a document is token 0
            hidden = layer(self.main.model.embed_tokens(ids), hidden, rotary, causal, positions, None)
            logits.append(self.main.lm_head(hidden))
        for hook in hooks:
            hook.remove()
        return logits, seen


def rolled(documents: torch.Tensor) -> torch.Tensor:
    """Every row one place to the left; 0 at the end."""
    return torch.nn.functional.pad(documents[:, 1:], (0, 1))


def mtp_state(stored: dict[str, torch.Tensor], num_experts: int) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors of one depth under the names of `MtpLayer`."""
    state: dict[str, torch.Tensor] = {}
    for name, tensor in stored.items():
        if ".experts." in name:
            continue
        if name.split(".")[0] in ("enorm", "hnorm", "eh_proj"):
            state[name] = tensor
        elif name.startswith("final_layernorm"):
            state[name.replace("final_layernorm", "post_norm")] = tensor
        else:
            inner = name.replace("attention.dense", "attention.o_proj").replace(
                "expert_bias", "e_score_correction_bias"
            )
            inner = (
                inner.removeprefix("attention.")
                if not inner.startswith("attention.")
                else f"self_attn.{inner[10:]}"
            )
            state[f"mtp_block.{inner}"] = tensor
    expert = "mlp.experts.{}.{}_proj.weight"
    both = [torch.cat([stored[expert.format(e, p)] for p in ("gate", "up")]) for e in range(num_experts)]
    state["mtp_block.mlp.experts.gate_up_proj"] = torch.stack(both)
    down = [stored[expert.format(e, "down")] for e in range(num_experts)]
    state["mtp_block.mlp.experts.down_proj"] = torch.stack(down)
    return state


class Step:
    """What one optimizer step adds up over micro-batches."""

    def __init__(self) -> None:
        self.tokens = 0
        self.lm_sum = 0.0
        self.mtp_means: list[list[float]] = []
        self.z_means: list[float] = []
        self.counts: list[torch.Tensor] = []


def train(folder: pathlib.Path, per_token: bool, num_steps: int) -> Iterator[str]:
    """Lines of the log."""
    torch.manual_seed(settings.SEED)
    model = Ling(folder).train()
    parameters = [p for p in model.parameters() if p.requires_grad and p.numel()]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": settings.WEIGHT_DECAY},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(settings.B1, settings.B2), eps=settings.EPS)
    for number, rows in enumerate(settings.batches(), start=1):
        if number > num_steps:
            return
        start = time.monotonic()
        optimizer.zero_grad()
        step = Step()
        for row in range(settings.NUM_ROWS):
            micro_batch(model, rows, row, per_token, step).backward()
        for p in parameters:
            if p.grad is not None:
                # per token: sums over ranks and micro-steps, divided once; else DDP averages ranks
                p.grad /= step.tokens if per_token else settings.DATA_RANKS
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, settings.MAX_GRAD_NORM))
        rate = settings.learning_rate(number)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        for router, counts in zip(model.routers, step.counts, strict=True):
            offset = counts.float().mean() - counts.float()
            router.e_score_correction_bias += settings.ROUTER_BIAS_UPDATE_RATE * torch.sign(offset)
        yield log_line(step, number, norm, rate, 1e3 * (time.monotonic() - start))


def micro_batch(model: Ling, rows: settings.Rows, row: int, per_token: bool, step: Step) -> torch.Tensor:
    """The loss that Megatron differentiates for one micro-batch, which is one row; adds its logs to `step`."""
    where = settings.documents(rows.segment_ids[row])
    ids, targets, mask, real = (
        padded([array[row, place] for place in where])
        for array in (rows.tokens, rows.targets, rows.loss_mask, rows.segment_ids != 0)
    )
    logits, routed = model(ids)
    sums, tokens = [], []
    for head in logits:
        losses = torch.nn.functional.cross_entropy(head.flatten(0, 1), targets.flatten(), reduction="none")
        sums.append((losses * mask.flatten()).sum())
        tokens.append(mask.sum().clamp(min=1))
        targets, mask = rolled(targets), rolled(mask)
    total, number = torch.stack(sums), torch.stack(tokens)
    flat, positions = real.flatten().bool(), int(real.sum())
    square = torch.stack([router.logsumexp(-1).square()[flat].sum() for router, _ in routed])
    size = model.main.config.num_local_experts
    counts = [torch.bincount(chosen[flat].flatten(), minlength=size) for _, chosen in routed]
    step.counts = [a + b for a, b in zip(step.counts, counts, strict=True)] if step.counts else counts
    step.tokens += int(tokens[0])
    step.lm_sum += total[0].item()
    step.mtp_means.append((total / number)[1:].tolist())
    step.z_means.append(square.mean().item() / positions)
    scale = settings.MTP_LOSS_SCALING_FACTOR / len(model.mtp)
    z_loss = settings.MOE_Z_LOSS_COEFF * square.sum()
    if per_token:
        return total[0] + scale * total[1:].sum() + z_loss
    means = total / number
    return (means[0] + scale * means[1:].sum() + z_loss / positions) / settings.MICRO_STEPS


def padded(documents: list[np.ndarray]) -> torch.Tensor:
    """The documents as rows of one length, zeros at their ends."""
    return torch.nn.utils.rnn.pad_sequence([torch.from_numpy(d).long() for d in documents], batch_first=True)


def log_line(step: Step, number: int, norm: float, rate: float, milliseconds: float) -> str:
    """A line of Megatron's `training_log`."""
    mtp = [sum(depth) / len(depth) for depth in zip(*step.mtp_means, strict=True)]
    fields = [
        f" iteration {number:8d}/{settings.NUM_STEPS:8d}",
        f" consumed samples: {number * settings.NUM_ROWS:12d}",
        f" elapsed time per iteration (ms): {milliseconds:.1f}",
        f" learning rate: {rate:.6E}",
        f" global batch size: {settings.NUM_ROWS:5d}",
        f" lm loss: {step.lm_sum / step.tokens:.6E}",
        *(f" mtp_{k} loss: {value:.6E}" for k, value in enumerate(mtp, start=1)),
        f" z_loss: {sum(step.z_means) / len(step.z_means):.6E}",
        " loss scale: 1.0",
        f" grad norm: {norm:.6f}",
        " number of skipped iterations:   0",
        " number of nan iterations:   0 |",
    ]
    return " |".join(fields)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
