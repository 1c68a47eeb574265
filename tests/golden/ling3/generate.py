"""Writes fresh Ling-3 cases with the stock Hugging Face code, in the format of the cases beside this file.

Runs in an environment of its own (torch 2.13, transformers 5.24; neither is a dependency of this project):

    python tests/golden/ling3/generate.py OUT [NAME ...]

The stock code casts to float32 in many places. Here its module sees a `torch` whose `float32` is `float64`, and
`Tensor.float` is `Tensor.double`, so that every number is computed in float64.
"""

import json
import sys
import types
from pathlib import Path

import torch
from case_table import BASE, CASES
from safetensors.torch import save_file
from transformers.modeling_layers import MtpLayer
from transformers.models.bailing_hybrid import configuration_bailing_hybrid as configuration
from transformers.models.bailing_hybrid import modeling_bailing_hybrid as modeling


class Float64Torch(types.ModuleType):
    """`torch` with float32 replaced by float64."""

    def __getattr__(self, name):
        return torch.float64 if name in ("float32", "float") else getattr(torch, name)


def make_case(out, name, changes, rows, length, pad, layout, seed):
    """One case folder; the expected numbers, and the gradient of every parameter."""
    torch.manual_seed(seed)
    config = configuration.BailingHybridConfig(**(BASE | changes))
    config._attn_implementation = config._experts_implementation = "eager"
    num_mtp = config.num_mtp_layers
    model = modeling.BailingHybridForCausalLM(config).eval()
    mtp_config = configuration.BailingHybridConfig(
        **(
            BASE
            | changes
            | {
                "layer_types": ["full_attention"] * max(num_mtp, 1),
                "num_hidden_layers": max(num_mtp, 1),
                "mlp_layer_types": ["sparse"] * max(num_mtp, 1),
            }
        )
    )
    mtp_config._attn_implementation = mtp_config._experts_implementation = "eager"
    mtp = torch.nn.ModuleList(
        MtpLayer(mtp_config, modeling.BailingHybridDecoderLayer, modeling.BailingHybridRMSNorm, k)
        for k in range(num_mtp)
    )
    for module in (model, mtp):
        for key, tensor in [*module.named_parameters(), *module.named_buffers()]:
            randomize(key, tensor)
    model.double(), mtp.double()
    model.model.rotary_emb = modeling.BailingHybridRotaryEmbedding(config)

    ids = torch.randint(0, config.vocab_size, (rows, length))
    mask = attention_mask(rows, length, pad)
    ids = ids * mask
    labels = torch.where((mask == 1) & (torch.rand(rows, length) > 0.1), ids, torch.full_like(ids, -100))
    # otherwise the library scores a row's first token from the last padding position
    labels[(mask.cumsum(1) == 1) & (mask == 1) & (mask[:, :1] == 0)] = -100
    expected, losses = run(model, mtp, ids, mask, labels)
    write(out / name, config, model, mtp, ids, mask, labels, expected, losses, layout, name, seed)


def attention_mask(rows, length, pad):
    """1 at real positions. "left", "right": half of the last row; "ragged": each row its length, sides in turns."""
    mask = torch.ones(rows, length, dtype=torch.long)
    for row in range(rows) if pad == "ragged" else [rows - 1] if pad else []:
        keep = max(length * (row + 1) // (rows + 1) if pad == "ragged" else length // 2, 1)
        is_left = pad == "left" or (pad == "ragged" and row % 2 == 0)
        mask[row, slice(0, length - keep) if is_left else slice(keep, None)] = 0
    return mask


def randomize(key, tensor):
    """Weights that make every part of the network matter; float32 values."""
    with torch.no_grad():
        if key.endswith("A_log"):
            tensor.copy_(torch.empty_like(tensor).uniform_(-1.0, 1.0))
        elif key.endswith("dt_bias"):
            tensor.copy_(torch.randn_like(tensor))
        elif key.endswith("e_score_correction_bias"):
            tensor.copy_(0.3 * torch.randn_like(tensor))
        elif "norm" in key:
            tensor.copy_(1 + 0.2 * torch.randn_like(tensor))
        elif "conv1d" in key:
            tensor.copy_(0.5 * torch.randn_like(tensor))
        elif "inv_freq" not in key and tensor.numel():
            fan_in = tensor.shape[-1] if "embed" not in key else 1
            tensor.copy_(torch.randn_like(tensor) / fan_in**0.5)
        tensor.copy_(tensor.to(torch.float32))  # what is stored is exact


def run(model, mtp, ids, mask, labels):
    """Expected tensors and the two losses (main, sum over depths)."""
    rows, length = ids.shape
    pad = mask == 0
    output = model(
        ids, attention_mask=mask, output_hidden_states=True, output_router_logits=True, use_cache=False
    )
    expected = {"logits": output.logits.masked_fill(pad[..., None], 0)}
    expected["last_hidden"] = output.hidden_states[-1].masked_fill(pad[..., None], 0)
    expected["hidden_states"] = torch.stack([h.masked_fill(pad[..., None], 0) for h in output.hidden_states])
    ce, ce_mask, loss = score(output.logits, labels, 1)
    expected |= {"ce": ce, "ce_mask": ce_mask, "loss": loss.reshape(1)}
    moe = [layer.mlp for layer in model.model.layers if isinstance(layer.mlp, modeling.BailingHybridMoE)]
    if moe:
        stacked = [
            route(m.gate, logits, (rows, length), pad)
            for m, logits in zip(moe, output.router_logits, strict=True)
        ]
        for key, parts in zip(
            ("router_logits", "topk_idx", "topk_weights"), zip(*stacked, strict=True), strict=True
        ):
            expected[key] = torch.stack(parts)
    hidden = output.hidden_states[-1]
    mtp_losses = []
    for k, layer in enumerate(mtp):
        keep = length - 1 - k
        hidden = hidden[:, :keep]
        embeds = model.model.embed_tokens(ids[:, k + 1 :])
        causal = torch.full((keep, keep), float("-inf"), dtype=torch.float64).triu(1)
        hidden_mask = causal[None, None] + torch.zeros(rows, 1, 1, 1, dtype=torch.float64)
        hidden_mask = hidden_mask.masked_fill(
            (pad[:, None, None, :keep]) & ~torch.eye(keep, dtype=torch.bool), float("-inf")
        )
        positions = torch.arange(keep)[None]
        rotary = model.model.rotary_emb(hidden, positions)
        seen = []
        hook = layer.mtp_block.mlp.gate.register_forward_hook(lambda _m, _i, out, seen=seen: seen.append(out))
        hidden = layer(embeds, hidden, rotary, hidden_mask, positions, None)
        hook.remove()
        logits = model.lm_head(hidden)
        bad = pad[:, :keep] | pad[:, k + 1 :]
        ce, ce_mask, loss = score(logits, labels, k + 2)
        ce_mask = ce_mask * (~bad)
        loss = (ce * ce_mask).sum() / ce_mask.sum().clamp_min(1)
        mtp_losses.append(loss)
        _, index, weights = route(layer.mtp_block.mlp.gate, seen[0][0], (rows, keep), bad)
        expected |= {
            f"mtp{k}_logits": logits.masked_fill(bad[..., None], 0),
            f"mtp{k}_ce": ce * ce_mask,
            f"mtp{k}_ce_mask": ce_mask,
            f"mtp{k}_loss": loss.reshape(1),
            f"mtp{k}_topk_idx": index,
            f"mtp{k}_topk_weights": weights,
        }
    return expected, (expected["loss"].sum(), sum(mtp_losses) if mtp_losses else None)


def score(logits, labels, shift):
    """Cross-entropy of each position's label `shift` ahead, its mask, and the mean."""
    width = logits.shape[1]
    target = torch.full((labels.shape[0], width), -100)
    source = labels[:, shift : shift + width]
    target[:, : source.shape[1]] = source
    ce_mask = (target != -100).int()
    ce = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), target.flatten(), reduction="none", ignore_index=-100
    )
    ce = ce.reshape(target.shape)
    return ce, ce_mask, ce.sum() / ce_mask.sum().clamp_min(1)


def route(gate, logits, shape, pad):
    """Router logits, chosen experts in rising order, and their weights; 0 and -1 at padding."""
    scores = logits.sigmoid()
    biased = scores + gate.e_score_correction_bias
    groups = biased.view(len(biased), gate.num_group, -1)
    best = groups.topk(2, dim=-1)[0].sum(-1).topk(gate.topk_group, dim=-1)[1]
    allowed = torch.zeros(groups.shape[:2], dtype=torch.bool).scatter_(1, best, True)
    biased = groups.masked_fill(~allowed[..., None], float("-inf")).reshape(len(biased), -1)
    index = biased.topk(gate.top_k, dim=-1)[1].sort(-1)[0]
    weights = scores.gather(1, index)
    if gate.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    weights = weights * gate.routed_scaling_factor
    flat = pad.reshape(-1, 1)
    parts = (logits.masked_fill(flat, 0), index.masked_fill(flat, -1), weights.masked_fill(flat, 0))
    return tuple(p.reshape(*shape, -1) for p in parts)


def checkpoint_tensors(model, mtp, num_layers, layout, values):
    """Name -> array under the checkpoint's names; `values(parameter)` picks what to store."""
    tensors = {}
    for key, parameter in [*model.named_parameters(), *model.named_buffers()]:
        if "rotary" in key:
            continue
        value = values(parameter)
        if value is not None:
            store(tensors, key, value, layout)
    for k, layer in enumerate(mtp):
        for key, parameter in [*layer.named_parameters(), *layer.named_buffers()]:
            value = values(parameter)
            if value is not None:
                key = key.removeprefix("mtp_block.").replace("post_norm.", "final_layernorm.")
                store(tensors, f"model.layers.{num_layers + k}.{key}", value, layout)
    return tensors


def store(tensors, key, value, layout):
    """One library tensor under its checkpoint names."""
    key = key.replace("model.embed_tokens", "model.word_embeddings").replace(".self_attn.", ".attention.")
    key = key.replace("forget_gate.", "").replace("e_score_correction_bias", "expert_bias")
    if key.endswith("experts.gate_up_proj"):
        base = key.removesuffix("gate_up_proj")
        for e, both in enumerate(value):
            gate, up = both.chunk(2)
            tensors[f"{base}{e}.gate_proj.weight"], tensors[f"{base}{e}.up_proj.weight"] = gate, up
    elif key.endswith("experts.down_proj"):
        for e, one in enumerate(value):
            tensors[f"{key.removesuffix('down_proj')}{e}.down_proj.weight"] = one
    elif key.endswith("conv1d.weight"):
        for letter, part in zip("qkv", value.chunk(3), strict=True):
            tensors[key.replace("conv1d", f"{letter}_conv1d")] = part
    elif key.endswith("attention.o_proj.weight"):
        tensors[key] = value
    else:
        tensors[key] = value
    for name in [n for n in tensors if n.endswith("attention.o_proj.weight")]:
        is_kda = name.replace("o_proj.weight", "A_log") in tensors
        seen = name.replace("o_proj.weight", "g_proj.weight") in tensors
        if seen and (layout == "save_pretrained" or not is_kda):
            tensors[name.replace("o_proj", "dense")] = tensors.pop(name)


def write(folder, config, model, mtp, ids, mask, labels, expected, losses, layout, name, seed):
    """The files of a case."""
    folder.mkdir(parents=True, exist_ok=True)
    num_layers = config.num_hidden_layers
    raw = json.loads(config.to_json_string(use_diff=False))
    raw["architectures"] = ["BailingHybridForCausalLM"]
    if layout == "hub":
        for new, old in (
            ("max_position_embeddings", "model_max_length"),
            ("norm_topk_prob", "moe_renormalize"),
            ("n_group", "num_expert_group"),
            ("num_experts_per_tok", "num_experts_per_token"),
        ):
            raw[new] = raw.pop(old)
        raw["head_dim"] = raw.pop("linear_head_dim")
        raw["rope_scaling"] = raw.pop("rope_parameters") and None
        for key in ("layer_types", "mlp_layer_types", "linear_num_heads", "linear_conv_kernel_dim"):
            raw.pop(key)
    (folder / "config.json").write_text(json.dumps(raw, indent=1, sort_keys=True))
    weights = checkpoint_tensors(model, mtp, num_layers, layout, lambda p: p.detach().to(torch.float32))
    save_file(
        {k: v.contiguous().clone() for k, v in weights.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    save_file(
        {"input_ids": ids.int(), "attention_mask": mask.int(), "labels": labels.int()},
        folder / "inputs.safetensors",
    )
    stored = {
        k: (v.detach().double() if v.is_floating_point() else v.int()).contiguous()
        for k, v in expected.items()
    }
    save_file(stored, folder / "expected.safetensors")
    grads, summaries = {}, {}
    for prefix, loss in zip(("main", "mtp"), losses, strict=True):
        summary = None
        if loss is not None:
            model.zero_grad(), mtp.zero_grad()
            loss.backward(retain_graph=True)
            named = checkpoint_tensors(model, mtp, num_layers, layout, lambda p: p.grad)
            grads |= {f"{prefix}/{k}": v.contiguous().clone() for k, v in named.items()}
            summary = {}
            for key, grad in named.items():
                flat = grad.flatten()
                probe = torch.sin(torch.arange(1, flat.numel() + 1, dtype=torch.float64))
                summary[key] = [float(f"{flat.norm():.13g}"), float(f"{(flat * probe).sum():.13g}")]
        summaries[prefix] = summary
    save_file(grads, folder / "grads.safetensors")
    meta = {
        "name": name,
        "seed": seed,
        "layout": layout,
        "layer_types": config.layer_types,
        "num_mtp_layers": config.num_mtp_layers,
        "grad_summary": summaries["main"],
        "mtp_grad_summary": summaries["mtp"],
        "made_with": {"torch": torch.__version__},
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=1))


def main():
    """Write the cases named on the command line, or all."""
    out, names = Path(sys.argv[1]), sys.argv[2:] or list(CASES)
    for name in names:
        changes, rows, length, pad, layout = CASES[name]
        make_case(out, name, changes, rows, length, pad, layout, seed=1000 + list(CASES).index(name))
        print("wrote", out / name)


if __name__ == "__main__":
    modeling.torch = Float64Torch("torch")
    torch.Tensor.float = torch.Tensor.double
    main()
