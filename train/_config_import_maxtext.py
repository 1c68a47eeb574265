"""MaxText YAML files and `key=value` arguments.

Names: MaxText `configs/base.yml`, and those that the Ling fork adds.
"""

import re
from collections.abc import Mapping
from typing import Any

import yaml

from ._config_import_rules import (
    CannotExpressError,
    Convert,
    Imported,
    Translation,
    flag,
    integer,
    only,
    real,
    translate,
)

_RULES: Mapping[str, tuple[str, Convert]] = {
    "steps": ("run.num_steps", integer),
    "init_weights_seed": ("run.seed", integer),
    "vocab_size": ("model.vocab_size", integer),
    "base_num_decoder_layers": ("model.num_layers", integer),
    "base_emb_dim": ("model.hidden_size", integer),
    "base_mlp_dim": ("model.intermediate_size", integer),
    "inhomogeneous_layer_cycle_interval": ("model.layer_group_size", integer),
    "first_num_dense_layers": ("model.first_k_dense_replace", integer),
    "normalization_layer_epsilon": ("model.rms_norm_eps", real),
    "logits_via_embedding": ("model.tie_word_embeddings", flag),
    "rope_max_timescale": ("model.rope.theta", real),
    "calculate_per_token_loss": ("loss.calculate_per_token_loss", flag),
    "mtp_per_layer_loss_norm": ("loss.mtp_per_layer_loss_norm", flag),
    "mtp_loss_scaling_factor": ("loss.mtp_loss_scaling_factor", real),
    "moe_z_loss_weight": ("loss.moe_z_loss_weight", real),
    "load_balance_loss_weight": ("loss.load_balance_loss_weight", real),
    "z_loss_multiplier": ("loss.z_loss_multiplier", real),
    "max_target_length": ("batch.num_positions", integer),
    "gradient_accumulation_steps": ("batch.gradient_accumulation_steps", integer),
    "eod_mask_loss": ("data.eod_mask_loss", flag),
    "adam_b1": ("optimizer.b1", real),
    "adam_b2": ("optimizer.b2", real),
    "adam_eps": ("optimizer.eps", real),
    "adam_weight_decay": ("optimizer.weight_decay", real),
    "muon_beta": ("optimizer.muon.momentum", real),
    "muon_consistent_rms": ("optimizer.muon.rms_scale", real),
    "muon_weight_decay_norm_params": ("optimizer.decay_norms", flag),
    "routed_bias_update_rate": ("optimizer.router_bias_update_rate", real),
    "routed_bias_zero_mean_update": ("optimizer.router_bias_zero_mean", flag),
    "learning_rate": ("optimizer.schedule.peak", real),
    "ici_data_parallelism": ("mesh.data", integer),
    "ici_fsdp_parallelism": ("mesh.fsdp", integer),
    "ici_expert_parallelism": ("mesh.expert", integer),
    "ici_context_parallelism": ("mesh.context", integer),
    "ici_tensor_parallelism": ("mesh.tensor", integer),
    "checkpoint_period": ("checkpoint.every_steps", integer),
    "eval_interval": ("evaluation.every_steps", lambda value: None if integer(value) < 1 else integer(value)),
    "eval_steps": ("evaluation.num_batches", integer),
    "log_period": ("logging.every_steps", integer),
    "mtp_num_layers": ("model.mtp.num_layers", lambda value: integer(value) or None),
    "dtype": ("model.dtype", lambda value: _dtype(value)),
    "remat_policy": ("model.remat", lambda value: _remat(value)),
}

_FIXED: Mapping[str, Convert] = {
    "weight_dtype": only("float32", reason="parameters are float32"),
    "mlp_activations": only("['silu', 'linear']", reason="feed-forwards are SwiGLU"),
    "dropout_rate": only(0, "0.0", reason="there is no dropout"),
    "enable_dropout": only(False, reason="there is no dropout"),
    "float32_logits": only(True, reason="logits are float32 in the softmax"),
    "routed_bias_dtype": only("float32", reason="the router bias is float32"),
    "enable_routed_bias_grad": only(False, reason="the router bias has no gradient"),
    "mtp_final_layernorm": only(True, reason="an MTP block ends in its own norm"),
    "use_kda_lora": only(False, reason="KDA projections have full rank"),
    "use_kda_safe_gate": only(True, reason="set kda.lower_bound=null for the softplus gate"),
    "num_vocab_tiling": lambda value: None,  # the fused output layer tiles by itself
    "scan_layers": lambda value: None,  # how layers are compiled, not what they compute
    "fuse_gate_up_proj": lambda value: None,
    "mu_dtype": only("float32", "", reason="optimizer state is float32"),
    "grad_dtype": only("float32", "", reason="gradients are float32; see step.accumulate_dtype"),
    "muon_ns_dtype": only("float32", "bfloat16", reason="see optimizer.muon.bfloat16_iterations"),
}


def read_maxtext(text: str) -> dict[str, Any]:
    """Settings by name, from YAML or from `key=value` words (a command line or script)."""
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError:
        document = None
    if isinstance(document, dict):
        return {str(name): value for name, value in document.items()}
    keys: dict[str, Any] = {}
    for name, value in re.findall(r"(?:^|\s)([A-Za-z_]\w*)=(\"[^\"]*\"|'[^']*'|\S+)", text):
        keys[name] = yaml.safe_load(value.strip("\"'"))
    return keys


def maxtext_tree(keys: Mapping[str, Any]) -> Imported:
    """Our configuration for MaxText settings."""
    translation = translate(keys, _RULES, _FIXED)
    _attention(translation)
    _experts(translation)
    _optimizer(translation)
    _batch(translation)
    translation.put("loss.calculate_per_token_loss", _per_token(translation))
    return translation.finish()


def _per_token(translation: Translation) -> bool:
    """The flag, or upstream MaxText's rule where the fork's flag is absent."""
    found = translation.tree.get("loss", {}).get("calculate_per_token_loss")
    if found is None:
        translation.remarks.append(
            "calculate_per_token_loss is absent: upstream MaxText divides by the token count"
        )
    return True if found is None else found


def _attention(translation: Translation) -> None:
    put, take = translation.put, translation.take
    heads, head_dim = take("base_num_query_heads", integer), take("head_dim", integer)
    kv_heads = take("base_num_kv_heads", integer, default=heads)
    is_mla = take("attention_type", lambda value: str(value) == "mla", default=False)
    partial = take("partial_rotary_factor", real, default=1.0)
    qk_norm = take("use_qk_norm", flag, default=False)
    if is_mla or "kv_lora_rank" in translation.keys:
        put("model.mla.num_heads", heads)
        rank = take("q_lora_rank", integer)
        translation.tree.setdefault("model", {}).setdefault("mla", {})["q_lora_rank"] = (
            rank or None
        )  # 0 is none
        for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
            put(f"model.mla.{name}", take(name, integer))
        put("model.mla.output_gate", "mla_gated_attention_type" in translation.keys)
        take("mla_gated_attention_type", only("head_wise", reason="the gate is one number per head"))
        put("model.mla.rope_interleaved", take("rope_interleave", flag))
    else:
        put("model.gqa.num_heads", heads)
        put("model.gqa.num_kv_heads", kv_heads)
        put("model.gqa.head_dim", head_dim)
        if head_dim:
            put("model.gqa.rope_head_dim", int(head_dim * partial))
        put("model.gqa.use_qk_norm", qk_norm)
        put("model.gqa.use_qkv_bias", take("attention_bias", flag))
    if translation.tree.get("model", {}).get("layer_group_size", 1) > 1:
        put("model.kda.num_heads", heads)
        put("model.kda.head_dim", head_dim)
        put("model.kda.conv_kernel_size", take("linear_conv_kernel_dim", integer))
        put("model.kda.lower_bound", take("kda_lower_bound", real))
        translation.remarks.append(
            "linear-attention layers are taken to be KDA; for lightning attention edit model"
        )
    if take("use_qk_clip", flag, default=False):
        put("optimizer.qk_clip_threshold", take("qk_clip_threshold", real, default=100.0))
        put("model.record_max_logits", True)
    else:
        take("qk_clip_threshold", real)  # off


def _experts(translation: Translation) -> None:
    put, take = translation.put, translation.take
    experts = take("num_experts", integer, default=1)
    if experts <= 1:
        return
    put("model.moe.num_experts", experts)
    put("model.moe.num_experts_per_tok", take("num_experts_per_tok", integer))
    put("model.moe.moe_intermediate_size", take("base_moe_mlp_dim", integer))
    put("model.moe.num_shared_experts", take("shared_experts", integer, default=0))
    put("model.moe.shared_expert_intermediate_size", take("moe_shared_expert_dim", integer))
    put("model.moe.num_routing_groups", _positive(take("n_routing_groups", integer)))
    put("model.moe.topk_routing_group", _positive(take("topk_routing_group", integer)))
    put("model.moe.routed_scaling_factor", take("routed_scaling_factor", real))
    put(
        "model.moe.score_function",
        take("routed_score_func", lambda value: str(value) or "softmax", default="softmax"),
    )
    put("model.moe.use_router_bias", take("routed_bias", flag, default=False))
    normalized = take("norm_topk_prob", flag, default=False)
    if not normalized and str(translation.keys.get("decoder_block", "")).startswith("ling"):
        normalized = True
        translation.remarks.append(
            "norm_topk_prob: true was written, the fork's Ling layers normalize whatever it says"
        )
    put("model.moe.norm_topk_prob", normalized)


def _optimizer(translation: Translation) -> None:
    put, take = translation.put, translation.take
    put("optimizer.name", take("opt_type", _optimizer_name, default="adamw"))
    clip = take("gradient_clipping_threshold", real, default=1.0)
    translation.tree.setdefault("optimizer", {})["max_grad_norm"] = clip or None  # 0 is off
    put("optimizer.schedule.kind", take("lr_schedule_type", _schedule_kind, default="cosine"))
    schedule_steps = take("learning_rate_schedule_steps", integer, default=-1)
    total = schedule_steps if schedule_steps > 0 else translation.tree.get("run", {}).get("num_steps")
    put("optimizer.schedule.total_steps", total)
    share = take("warmup_steps_fraction", real)
    if share is not None and total:
        put("optimizer.schedule.warmup_steps", int(total * share))
    final = take("cosine_learning_rate_final_fraction", real)
    peak = translation.tree["optimizer"].get("schedule", {}).get("peak")
    if final is not None and peak is not None:
        put("optimizer.schedule.final", final * peak)
    if "muon_ns_dtype" in translation.keys:
        put("optimizer.muon.bfloat16_iterations", str(translation.keys["muon_ns_dtype"]) == "bfloat16")


def _batch(translation: Translation) -> None:
    """Rows of the global batch, where the number of devices can be told from the mesh."""
    per_device = translation.take("per_device_batch_size", real)
    if per_device is None:
        return
    sizes = translation.tree.get("mesh", {}).values()
    steps = translation.tree.get("batch", {}).get("gradient_accumulation_steps", 1)
    devices = 1
    for size in sizes:
        devices *= size
    if not sizes or any(size < 1 for size in sizes):
        translation.drop(
            "per_device_batch_size",
            "batch.num_rows = per_device_batch_size x devices x gradient_accumulation_steps, and the file "
            "leaves the number of devices open; set batch.num_rows",
        )
        return
    translation.put("batch.num_rows", integer(per_device * devices * steps))


def _positive(value: int | None) -> int | None:
    """MaxText writes -1 for "no groups"."""
    return value if value is not None and value > 0 else None


def _optimizer_name(value: Any) -> str:
    if str(value) not in ("adamw", "muon"):
        raise CannotExpressError("optimizers are adamw and muon")
    return str(value)


def _schedule_kind(value: Any) -> str:
    if str(value) not in ("cosine", "wsd", "constant"):
        raise CannotExpressError("schedules are constant, cosine and wsd")
    return str(value)


def _dtype(value: Any) -> str:
    if str(value) not in ("bfloat16", "float32"):
        raise CannotExpressError("compute dtypes are bfloat16 and float32")
    return str(value)


def _remat(value: Any) -> str:
    kinds = {
        "full": "block",
        "minimal": "dots",
        "save_dot_except_mlp": "dots",
        "minimal_offloaded": "offload",
    }
    if str(value) not in kinds:
        raise CannotExpressError("set model.remat to none, dots, block or offload")
    return kinds[str(value)]
