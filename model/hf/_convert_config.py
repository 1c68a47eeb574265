"""Between a Ling-3 `config.json` and `ModelConfig`."""

import dataclasses
import math
from collections.abc import Sequence

from .._config import Dtype, KdaConfig, MlaConfig, ModelConfig, MoeConfig, MtpConfig, RopeConfig
from ._errors import CheckpointError
from ._hf_config import HfConfig, LayerType

LATENT_NORM_EPS = 1e-6  # the reference norms both latents with 1e-6, whatever rms_norm_eps is


def to_model_config(hf: HfConfig, layer_types: Sequence[LayerType], *, dtype: Dtype) -> ModelConfig:
    """The model that a `config.json` describes.

    Args:
        hf: The file.
        layer_types: Kind of every layer, from the file or from the tensors.
        dtype: Compute dtype of the model.

    Raises:
        CheckpointError: The numbers do not make a model; the model's own message follows.
    """
    try:
        return _build(hf, layer_types, dtype)
    except ValueError as error:
        raise CheckpointError([f"config.json: {error}"]) from error


def to_hf_config(config: ModelConfig) -> HfConfig:
    """The `config.json` of a model, with no token ids and the reference's context length.

    Raises:
        CheckpointError: The model is no Ling-3: no MLA, no experts, lightning attention, tied embeddings, YaRN,
            softmax scores, no router bias or no head gate.
    """
    mla, kda, moe = config.mla, config.kda, config.moe
    problems = [text for bad, text in _foreign_features(config) if bad]
    if problems:
        raise CheckpointError([f"bailing_hybrid cannot hold this model: {text}" for text in problems])
    assert mla is not None
    assert moe is not None
    plan = config.layer_plan
    return HfConfig(
        layout="hub",
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        # a model without dense layers has no such width; the reader wants a positive one
        intermediate_size=config.intermediate_size or moe.moe_intermediate_size,
        moe_intermediate_size=moe.moe_intermediate_size,
        shared_intermediate_size=moe.shared_intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=mla.num_heads,
        kda_head_dim=mla.v_head_dim if kda is None else kda.head_dim,
        conv_width=4 if kda is None else kda.conv_kernel_size,
        q_lora_rank=mla.q_lora_rank,
        kv_lora_rank=mla.kv_lora_rank,
        qk_nope_head_dim=mla.qk_nope_head_dim,
        qk_rope_head_dim=mla.qk_rope_head_dim,
        v_head_dim=mla.v_head_dim,
        num_experts=moe.num_experts,
        num_experts_per_tok=moe.num_experts_per_tok,
        n_group=moe.num_routing_groups,
        topk_group=moe.topk_routing_group,
        num_shared_experts=moe.num_shared_experts,
        norm_topk_prob=moe.norm_topk_prob,
        routed_scaling_factor=moe.routed_scaling_factor,
        first_k_dense_replace=config.first_k_dense_replace,
        layer_group_size=config.layer_group_size,
        layer_types=tuple(
            "full_attention" if layer.mixer == "full" else "linear_attention" for layer in plan
        ),
        mlp_types=tuple("dense" if layer.ffn == "dense" else "sparse" for layer in plan),
        num_mtp_layers=config.num_mtp_layers,
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=config.rope.theta,
        kda_safe_gate=kda is None or kda.lower_bound is not None,
        kda_lower_bound=-5.0 if kda is None or kda.lower_bound is None else kda.lower_bound,
        initializer_range=config.initializer_range,
        max_position_embeddings=262144,
        expert_swiglu_limits=_hf_limits(moe.expert_swiglu_limits),
        shared_swiglu_limits=_hf_limits(moe.shared_swiglu_limits),
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


def _build(hf: HfConfig, layer_types: Sequence[LayerType], dtype: Dtype) -> ModelConfig:
    shared = hf.num_shared_experts
    config = ModelConfig(
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        num_layers=hf.num_hidden_layers,
        intermediate_size=hf.intermediate_size,
        layer_group_size=hf.layer_group_size,
        first_k_dense_replace=hf.first_k_dense_replace,
        mla=MlaConfig(
            num_heads=hf.num_attention_heads,
            q_lora_rank=hf.q_lora_rank,
            kv_lora_rank=hf.kv_lora_rank,
            qk_nope_head_dim=hf.qk_nope_head_dim,
            qk_rope_head_dim=hf.qk_rope_head_dim,
            v_head_dim=hf.v_head_dim,
            latent_norm_eps=LATENT_NORM_EPS,
        ),
        kda=KdaConfig(
            num_heads=hf.num_attention_heads,
            head_dim=hf.kda_head_dim,
            conv_kernel_size=hf.conv_width,
            lower_bound=hf.kda_lower_bound if hf.kda_safe_gate else None,
        ),
        moe=MoeConfig(
            num_experts=hf.num_experts,
            num_experts_per_tok=hf.num_experts_per_tok,
            moe_intermediate_size=hf.moe_intermediate_size,
            num_shared_experts=shared,
            shared_expert_intermediate_size=hf.shared_intermediate_size // shared if shared else None,
            num_routing_groups=hf.n_group,
            topk_routing_group=hf.topk_group,
            norm_topk_prob=hf.norm_topk_prob,
            routed_scaling_factor=hf.routed_scaling_factor,
            expert_swiglu_limits=_our_limits(
                "expert_swiglu_limit_list", hf.expert_swiglu_limits, hf.num_hidden_layers
            ),
            shared_swiglu_limits=_our_limits(
                "share_expert_swiglu_limit_list", hf.shared_swiglu_limits, hf.num_hidden_layers
            ),
        ),
        mtp=MtpConfig(num_layers=hf.num_mtp_layers) if hf.num_mtp_layers else None,
        rope=RopeConfig(theta=hf.rope_theta),
        rms_norm_eps=hf.rms_norm_eps,
        initializer_range=hf.initializer_range,
        dtype=dtype,
        layer_types=tuple("full" if kind == "full_attention" else "linear" for kind in layer_types),
        ffn_types=tuple("dense" if kind == "dense" else "moe" for kind in hf.mlp_types),
    )
    return _without_redundant_types(config)


def _without_redundant_types(config: ModelConfig) -> ModelConfig:
    """The same model with `layer_types` and `ffn_types` None where the rules derive them."""
    for name in ("layer_types", "ffn_types"):
        derived = dataclasses.replace(config, **{name: None})
        if derived.layer_plan == config.layer_plan:
            config = derived
    return config


def _our_limits(
    name: str, limits: tuple[float | None, ...] | None, num_layers: int
) -> tuple[float, ...] | None:
    if limits is None or not any(limits):
        return None
    if len(limits) < num_layers:
        raise ValueError(
            f"{name} must have one number per layer, num_hidden_layers={num_layers}, got {len(limits)}"
        )
    if any(limits[num_layers:]):
        raise ValueError(
            f"{name} limits an MTP layer, which this model does not compute; got {limits[num_layers:]}"
        )
    return tuple(limit or math.inf for limit in limits[:num_layers])


def _hf_limits(limits: tuple[float, ...] | None) -> tuple[float | None, ...] | None:
    return None if limits is None else tuple(None if math.isinf(limit) else limit for limit in limits)


def _foreign_features(config: ModelConfig) -> list[tuple[bool, str]]:
    mla, moe, kda = config.mla, config.moe, config.kda
    return [
        (mla is None, "full-attention layers must be MLA, got GQA"),
        (moe is None, "it needs experts (moe), got none"),
        (config.lightning is not None, "linear-attention layers must be KDA, got lightning attention"),
        (config.tie_word_embeddings, "the output head must be a tensor of its own, got tied embeddings"),
        (config.rope.yarn is not None, "positions must not be interpolated, got YaRN"),
        (moe is not None and moe.score_function != "sigmoid", "router scores must be sigmoid, got softmax"),
        (moe is not None and not moe.use_router_bias, "the router must have an expert bias, got none"),
        (mla is not None and not mla.output_gate, "MLA must have the head gate, got none"),
        (mla is not None and not mla.rope_interleaved, "rope pairs must be interleaved, got halves"),
        (
            mla is not None and mla.latent_norm_eps != LATENT_NORM_EPS,
            f"latent_norm_eps must be {LATENT_NORM_EPS}, got {mla and mla.latent_norm_eps}",
        ),
        (
            mla is not None and kda is not None and mla.num_heads != kda.num_heads,
            f"MLA and KDA must have equally many heads, got {mla and mla.num_heads} and {kda and kda.num_heads}",
        ),
    ]
