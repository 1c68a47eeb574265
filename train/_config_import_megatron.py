"""Megatron-LM command lines, scripts and YAML.

Names: Megatron-LM `megatron/training/arguments.py`, and those that the Ling fork adds.
"""

import re
import shlex
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

_ASSIGNMENT = re.compile(
    r"^\s*(?:export\s+)?(?P<name>[A-Za-z_]\w*)=(?P<value>\"[^\"]*\"|'[^']*'|[^\s()#;]+)\s*(?:[;#].*)?$"
)
_ARRAY = re.compile(r"\b\w+\+?=\((?=\s*--|\s*$)", re.MULTILINE)  # the opening of NAME=( --flag ... )
_VARIABLE = re.compile(r"\$\{(?P<braced>\w+)(?::-(?P<default>[^}]*))?\}|\$(?P<plain>\w+)")

_RULES: Mapping[str, tuple[str, Convert]] = {
    "train_iters": ("run.num_steps", integer),
    "seed": ("run.seed", integer),
    "num_layers": ("model.num_layers", integer),
    "hidden_size": ("model.hidden_size", integer),
    "ffn_hidden_size": ("model.intermediate_size", integer),
    "layer_group_size": ("model.layer_group_size", integer),
    "rotary_base": ("model.rope.theta", real),
    "norm_epsilon": ("model.rms_norm_eps", real),
    "init_method_std": ("model.initializer_range", real),
    "mtp_num_layers": ("model.mtp.num_layers", integer),
    "micro_batch_size": ("loss.micro_batch_size", integer),
    "mtp_loss_scaling_factor": ("loss.mtp_loss_scaling_factor", real),
    "moe_z_loss_coeff": ("loss.moe_z_loss_weight", real),
    "global_batch_size": ("batch.num_rows", integer),
    "seq_length": ("batch.num_positions", integer),
    "eod_mask_loss": ("data.eod_mask_loss", flag),
    "adam_beta1": ("optimizer.b1", real),
    "adam_beta2": ("optimizer.b2", real),
    "adam_eps": ("optimizer.eps", real),
    "weight_decay": ("optimizer.weight_decay", real),
    "weight_decay_norm_params": ("optimizer.decay_norms", flag),
    "muon_momentum": ("optimizer.muon.momentum", real),
    "muon_matched_adamw_rms": ("optimizer.muon.rms_scale", real),
    "moe_router_bias_update_rate": ("optimizer.router_bias_update_rate", real),
    "bias_zero_mean_update": ("optimizer.router_bias_zero_mean", flag),
    "lr": ("optimizer.schedule.peak", real),
    "min_lr": ("optimizer.schedule.final", real),
    "lr_warmup_iters": ("optimizer.schedule.warmup_steps", integer),
    "lr_decay_iters": ("optimizer.schedule.total_steps", integer),
    "lr_wsd_decay_iters": ("optimizer.schedule.decay_steps", integer),
    "tensor_model_parallel_size": ("mesh.tensor", integer),
    "context_parallel_size": ("mesh.context", integer),
    "expert_model_parallel_size": ("mesh.expert", integer),
    "save_interval": ("checkpoint.every_steps", integer),
    "eval_interval": ("evaluation.every_steps", integer),
    "eval_iters": ("evaluation.num_batches", integer),
    "log_interval": ("logging.every_steps", integer),
}

_FIXED: Mapping[str, Convert] = {
    "swiglu": only(True, "", reason="feed-forwards are SwiGLU"),
    "normalization": only("RMSNorm", reason="norms are RMSNorm"),
    "disable_bias_linear": only(True, "", reason="linear layers have no bias"),
    "position_embedding_type": only("rope", "none", reason="positions are rope"),
    "pipeline_model_parallel_size": only(1, reason="there is no pipeline axis; use fsdp"),
    "bf16": only(True, "", reason="false is dtype float32: set model.dtype"),
    "hidden_dropout": only(0, "0.0", reason="there is no dropout"),
    "attention_dropout": only(0, "0.0", reason="there is no dropout"),
    "use_distributed_optimizer": only(True, "", reason="fsdp shards the optimizer state"),
    "transformer_impl": only("local", "transformer_engine", reason="one implementation"),
    "no_kda_lora": only(True, "", reason="KDA projections have full rank"),
    "kda_safe_gate": only(True, "", reason="use kda.lower_bound=null for the softplus gate"),
    "use_mcore_models": only(True, "", reason="one implementation"),
}


def read_megatron(text: str) -> dict[str, Any]:
    """Settings by name (underscores): from YAML, or from `--flags` of a command line or script.

    Shell variables are replaced where the script assigns them. A flag without a value is True.
    """
    if not re.search(r"(?:^|\s|\")--[A-Za-z]", text):
        document = yaml.safe_load(text)
        return _flat(document) if isinstance(document, dict) else {}
    variables: dict[str, str] = {}
    for line in text.splitlines():
        match = _ASSIGNMENT.match(line)
        if match:
            variables[match["name"]] = _expand(match["value"].strip("\"'"), variables)
    text = _ARRAY.sub(" ", text.replace("\\\n", " "))
    words = shlex.split(_expand(text, variables), comments=True)
    keys: dict[str, Any] = {}
    name: str | None = None
    for word in words:
        word = word.strip("()")
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            name = name.replace("-", "_")
            keys[name] = value if value else True
        elif name is not None and word not in ("", "\\", ";", "&&", "|"):
            if keys[name] is True:
                keys[name] = word
            name = None if word.endswith(";") else name
    return keys


def megatron_tree(keys: Mapping[str, Any]) -> Imported:
    """Our configuration for Megatron settings."""
    translation = translate(keys, _RULES, _FIXED)
    _attention(translation)
    _experts(translation)
    _loss(translation)
    _optimizer(translation)
    _others(translation)
    return translation.finish()


def _attention(translation: Translation) -> None:
    heads = translation.take("num_attention_heads", integer)
    head_dim = translation.take("kv_channels", integer)
    hidden = translation.tree.get("model", {}).get("hidden_size")
    if head_dim is None and heads and hidden:
        head_dim = hidden // heads  # Megatron's default
    grouped = translation.tree.get("model", {}).get("layer_group_size", 1) > 1
    if translation.take("multi_latent_attention", flag, default=False):
        translation.put("model.mla.num_heads", heads)
        translation.put("model.mla.q_lora_rank", translation.take("q_lora_rank", integer))
        translation.tree.setdefault("model", {}).setdefault("mla", {}).setdefault("q_lora_rank", None)
        # Defaults of Megatron-core's MLATransformerConfig.
        for name, ours, default in (
            ("kv_lora_rank", "kv_lora_rank", 512),
            ("qk_head_dim", "qk_nope_head_dim", 128),
            ("qk_pos_emb_head_dim", "qk_rope_head_dim", 64),
            ("v_head_dim", "v_head_dim", 128),
        ):
            translation.put(f"model.mla.{ours}", translation.take(name, integer, default=default))
        translation.put("model.mla.output_gate", "gated_attention_proj_granularity" in translation.keys)
        translation.take(
            "gated_attention_proj_granularity", only("head_wise", reason="the gate is one number per head")
        )
        translation.take("qk_layernorm", flag)  # the latent norms, which are always there
    else:
        translation.put("model.gqa.num_heads", heads)
        translation.put(
            "model.gqa.num_kv_heads", translation.take("num_query_groups", integer, default=heads)
        )
        translation.take("group_query_attention", flag)
        translation.put("model.gqa.head_dim", head_dim)
        percent = translation.take("rotary_percent", real, default=1.0)
        if head_dim:
            translation.put("model.gqa.rope_head_dim", int(head_dim * percent))
        translation.put("model.gqa.use_qk_norm", translation.take("qk_layernorm", flag, default=False))
        translation.put("model.gqa.use_qkv_bias", translation.take("add_qkv_bias", flag, default=False))
    if grouped:
        translation.put("model.kda.num_heads", heads)
        translation.put("model.kda.head_dim", head_dim)
        translation.put("model.kda.conv_kernel_size", translation.take("linear_conv_kernel_dim", integer))
        translation.put("model.kda.lower_bound", translation.take("kda_lower_bound", real))
        translation.remarks.append(
            "linear-attention layers are taken to be KDA; for lightning attention edit model"
        )


def _experts(translation: Translation) -> None:
    experts = translation.take("num_experts", integer)
    if experts is None:
        return
    put, take = translation.put, translation.take
    put("model.moe.num_experts", experts)
    put("model.moe.num_experts_per_tok", take("moe_router_topk", integer, default=2))
    hidden = translation.tree.get("model", {}).get("intermediate_size")
    put("model.moe.moe_intermediate_size", take("moe_ffn_hidden_size", integer, default=hidden))
    shared = take("moe_shared_expert_intermediate_size", integer)
    put("model.moe.num_shared_experts", 1 if shared else 0)
    put("model.moe.shared_expert_intermediate_size", shared)
    put("model.moe.num_routing_groups", take("moe_router_num_groups", integer))
    put("model.moe.topk_routing_group", take("moe_router_group_topk", integer))
    put("model.moe.routed_scaling_factor", take("moe_router_topk_scaling_factor", real))
    put("model.moe.score_function", take("moe_router_score_function", str, default="softmax"))
    put("model.moe.use_router_bias", take("moe_router_enable_expert_bias", flag, default=False))
    take("moe_router_dtype", only("fp32", "fp64", reason="router scores are float32"))
    take("moe_token_dispatcher_type", str)  # how tokens travel, not what is computed
    take("moe_grouped_gemm", flag)
    first = take("first_k_dense_replace", integer)
    layers = take("moe_layer_freq", _dense_prefix)
    put("model.first_k_dense_replace", first if first is not None else layers)
    scope = take("moe_router_load_balancing_type", _balance_scope, default="micro_batch")
    if scope is not None:
        put("loss.load_balance_scope", scope)
        put("loss.load_balance_loss_weight", take("moe_aux_loss_coeff", real))
    elif "moe_aux_loss_coeff" in translation.keys:
        translation.drop("moe_aux_loss_coeff", "the load-balancing type is none, so it has no effect")


def _loss(translation: Translation) -> None:
    negated = translation.take("no_calculate_per_token_loss", flag, default=False)
    per_token = translation.take("calculate_per_token_loss", flag, default=False)
    translation.put("loss.calculate_per_token_loss", per_token and not negated)
    translation.remarks.append(
        "loss follows our rules, which do not depend on the cut of the batch; the rules of one Megatron "
        "release are LossSemantics.megatron(...), for comparison"
    )


def _optimizer(translation: Translation) -> None:
    put, take = translation.put, translation.take
    put("optimizer.name", take("optimizer", _optimizer_name, default="adamw"))
    clip = take("clip_grad", real, default=1.0)
    translation.tree.setdefault("optimizer", {})["max_grad_norm"] = clip or None  # 0 is off
    put("optimizer.schedule.kind", take("lr_decay_style", _schedule_kind, default="linear_is_missing"))
    if translation.tree["optimizer"]["schedule"].get("kind") == "linear_is_missing":
        translation.tree["optimizer"]["schedule"]["kind"] = "constant"
        translation.remarks.append(
            "lr_decay_style is Megatron's default, linear, which we lack: constant was written"
        )
    put("optimizer.schedule.decay_shape", take("lr_wsd_decay_style", _decay_shape))
    if take("enable_qkclip", flag, default=False) or take("qk_clip", flag, default=False):
        threshold = take(
            "attention_max_qkscores", real, default=take("qk_clip_threshold", real, default=100.0)
        )
        put("optimizer.qk_clip_threshold", threshold)
        put("model.record_max_logits", True)


def _others(translation: Translation) -> None:
    put, take = translation.put, translation.take
    untied = take("untie_embeddings_and_output_weights", flag, default=False)
    put("model.tie_word_embeddings", not untied)
    padded = take("padded_vocab_size", integer)
    vocab = padded if padded is not None else take("vocab_size", integer)
    if vocab is not None:
        multiple = 1 if padded is not None else take("make_vocab_size_divisible_by", integer, default=128)
        multiple *= translation.tree.get("mesh", {}).get("tensor", 1)
        put("model.vocab_size", -(-vocab // multiple) * multiple)
    put("model.remat", take("recompute_granularity", _remat))
    if "fp16" in translation.keys:
        translation.drop("fp16", "compute dtypes are bfloat16 and float32")
    put("model.dtype", "bfloat16" if "bf16" in translation.keys else "float32")
    if "global_batch_size" in translation.keys:
        translation.remarks.append(
            "batch.gradient_accumulation_steps is 1: Megatron derives it from the number of ranks, and "
            "here it does not change the loss; set it to fit memory"
        )


def _optimizer_name(value: Any) -> str:
    names = {"adam": "adamw", "muon": "muon", "dist_muon": "muon"}
    if str(value) not in names:
        raise CannotExpressError("optimizers are adamw and muon")
    return names[str(value)]


def _schedule_kind(value: Any) -> str:
    kinds = {"constant": "constant", "cosine": "cosine", "wsd": "wsd"}
    if str(value).lower() not in kinds:
        raise CannotExpressError("schedules are constant, cosine and wsd")
    return kinds[str(value).lower()]


def _decay_shape(value: Any) -> str:
    shapes = {"linear": "linear", "minus_sqrt": "sqrt"}
    if str(value) not in shapes:
        raise CannotExpressError("a wsd decay is linear or minus_sqrt")
    return shapes[str(value)]


def _balance_scope(value: Any) -> str | None:
    scopes = {
        "none": None, "aux_loss": "micro_batch", "seq_aux_loss": "sequence", "global_aux_loss": "global_batch",
    }  # fmt: skip
    if str(value) not in scopes:
        raise CannotExpressError("load balancing is none, aux_loss, seq_aux_loss or global_aux_loss")
    return scopes[str(value)]


def _remat(value: Any) -> str:
    kinds = {"full": "block", "selective": "dots"}
    if str(value) not in kinds:
        raise CannotExpressError("recomputation is full or selective")
    return kinds[str(value)]


def _dense_prefix(value: Any) -> int:
    """Leading dense layers of `moe_layer_freq`: 1, or a pattern such as `([0]*1+[1]*23)`."""
    text = str(value).replace(" ", "").strip("()")
    if text == "1":
        return 0
    match = re.fullmatch(r"\[0\]\*(\d+)\+\[1\]\*\d+", text)
    if match:
        return int(match[1])
    match = re.fullmatch(r"\[((?:0,)*)((?:1,)*1)\]", text)
    if match:
        return match[1].count("0")
    raise CannotExpressError("dense layers must come first: set model.ffn_types by hand")


def _expand(text: str, variables: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        name = match["braced"] or match["plain"]
        return variables.get(name, match["default"] if match["default"] is not None else match[0])

    return _VARIABLE.sub(value, text)


def _flat(document: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of nested YAML sections by their last name; Megatron's names are unique."""
    keys: dict[str, Any] = {}
    for name, value in document.items():
        if isinstance(value, dict):
            keys.update(_flat(value))
        else:
            keys[str(name).replace("-", "_")] = value
    return keys
