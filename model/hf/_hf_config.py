"""`config.json` of the Ling-3 family (`bailing_hybrid`, hub name `bailing_moe_v3`), in both of its spellings.

The hub writes `max_position_embeddings`, `norm_topk_prob`, `n_group`, `num_experts_per_tok`; transformers 5.24 writes
`model_max_length`, `moe_renormalize`, `num_expert_group`, `num_experts_per_token`. `head_dim` is the KDA head size on
the hub and the rope size in a file of save_pretrained, which has the KDA head size in `linear_head_dim`.
Source: transformers 5.24.0, models/bailing_hybrid/configuration_bailing_hybrid.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ._errors import CheckpointError
from ._hf_fields import Fields

Layout = Literal["hub", "save_pretrained"]
LayerType = Literal["linear_attention", "full_attention"]
MlpType = Literal["dense", "sparse"]

MODEL_TYPES = ("bailing_hybrid", "bailing_moe_v3")
MAX_LAYERS = 1000
MAX_EXPERTS = 100_000  # with MAX_LAYERS: a damaged file must not fill the memory with names


@dataclass(frozen=True, kw_only=True)
class HfConfig:
    """A Ling-3 `config.json`, read once, with one name for each number.

    `layer_types` is None when the file does not say; the tensors then decide (`attention.A_log` and others
    that only KDA has).
    """

    layout: Layout
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    shared_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    kda_head_dim: int
    conv_width: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    num_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    num_shared_experts: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    first_k_dense_replace: int
    layer_group_size: int
    layer_types: tuple[LayerType, ...] | None
    mlp_types: tuple[MlpType, ...]
    num_mtp_layers: int
    rms_norm_eps: float
    rope_theta: float
    kda_safe_gate: bool
    kda_lower_bound: float
    initializer_range: float
    max_position_embeddings: int
    expert_swiglu_limits: tuple[float | None, ...] | None
    shared_swiglu_limits: tuple[float | None, ...] | None
    bos_token_id: int | None
    eos_token_id: int | tuple[int, ...] | None
    pad_token_id: int | None

    def default_layer_types(self) -> tuple[LayerType, ...]:
        """Layer kinds by the hub's rule: the last layer of each group, and every layer of an incomplete last group, is
        full attention. (transformers 5.24 leaves an incomplete last group linear; its files carry `layer_types`.)
        """
        whole = self.num_hidden_layers // self.layer_group_size * self.layer_group_size
        return tuple(
            "full_attention" if (i + 1) % self.layer_group_size == 0 or i >= whole else "linear_attention"
            for i in range(self.num_hidden_layers)
        )


def read_hf_config(raw: Mapping[str, object]) -> HfConfig:
    """The configuration of a parsed `config.json`.

    Raises:
        CheckpointError: Another model type, a missing field, two spellings that disagree, a value of the wrong type,
            or a feature that the model does not compute; one line each.
    """
    if raw.get("model_type") not in MODEL_TYPES:
        got = raw.get("model_type")
        raise CheckpointError(
            [f"config.json: model_type must be one of {MODEL_TYPES}, got {got!r}; only Ling-3 is read"]
        )
    fields = Fields(raw)
    layout: Layout = "save_pretrained" if "linear_head_dim" in raw else "hub"
    num_layers = fields.integer("num_hidden_layers", least=1, most=MAX_LAYERS)
    moe_size = fields.integer("moe_intermediate_size")
    num_shared = fields.integer("num_shared_experts", default=0)
    shared_unit = fields.integer("moe_shared_expert_intermediate_size", default=moe_size)
    first_dense = fields.integer("first_k_dense_replace", default=0)
    config = HfConfig(
        layout=layout,
        vocab_size=fields.integer("vocab_size", least=1),
        hidden_size=fields.integer("hidden_size", least=1),
        intermediate_size=fields.integer("intermediate_size", least=1),
        moe_intermediate_size=moe_size,
        shared_intermediate_size=shared_unit * num_shared,
        num_hidden_layers=num_layers,
        num_attention_heads=fields.integer("num_attention_heads", least=1),
        kda_head_dim=fields.integer(
            "linear_head_dim" if layout == "save_pretrained" else "head_dim", least=1
        ),
        conv_width=fields.integer("short_conv_kernel_size", default=4, least=1),
        q_lora_rank=fields.optional_integer("q_lora_rank"),
        kv_lora_rank=fields.integer("kv_lora_rank", least=1),
        qk_nope_head_dim=fields.integer("qk_nope_head_dim"),
        qk_rope_head_dim=fields.integer("qk_rope_head_dim"),
        v_head_dim=fields.integer("v_head_dim", least=1),
        num_experts=fields.integer("num_experts", most=MAX_EXPERTS),
        num_experts_per_tok=fields.integer("num_experts_per_tok"),
        n_group=fields.integer("n_group", default=1, least=1),
        topk_group=fields.integer("topk_group", default=1, least=1),
        num_shared_experts=num_shared,
        norm_topk_prob=fields.boolean("norm_topk_prob", default=True),
        routed_scaling_factor=fields.number("routed_scaling_factor", default=1.0),
        first_k_dense_replace=first_dense,
        layer_group_size=fields.integer("layer_group_size", least=1),
        layer_types=fields.kinds("layer_types", num_layers, ("linear_attention", "full_attention")),
        mlp_types=fields.kinds("mlp_layer_types", num_layers, ("dense", "sparse"))
        or _default_mlp_types(num_layers, first_dense),
        num_mtp_layers=fields.integer("num_nextn_predict_layers", default=0, most=MAX_LAYERS),
        rms_norm_eps=fields.number("rms_norm_eps", default=1e-6),
        rope_theta=fields.rope_theta(),
        kda_safe_gate=fields.boolean("kda_safe_gate", default=True),
        kda_lower_bound=fields.number("kda_lower_bound", default=-5.0),
        initializer_range=fields.number("initializer_range", default=0.02),
        max_position_embeddings=fields.integer("max_position_embeddings", default=262144),
        expert_swiglu_limits=fields.limits("expert_swiglu_limit_list"),
        shared_swiglu_limits=fields.limits("share_expert_swiglu_limit_list"),
        bos_token_id=fields.optional_integer("bos_token_id"),
        eos_token_id=fields.token_ids("eos_token_id"),
        pad_token_id=fields.optional_integer("pad_token_id"),
    )
    fields.check_fixed()
    fields.check_heads(config.num_attention_heads)
    if fields.problems:
        raise CheckpointError([f"config.json: {problem}" for problem in fields.problems])
    return config


def write_hf_config(config: HfConfig, *, layout: Layout, dtype: str) -> dict[str, object]:
    """`config.json` in the spelling asked for; `read_hf_config` gives the same configuration back.

    Args:
        config: What to write; `layer_types` None is written by the hub's rule.
        layout: Spelling of the field names, and the meaning of `head_dim`.
        dtype: Name of the dtype that the tensors are stored in, such as `bfloat16`.
    """
    types = config.layer_types or config.default_layer_types()
    raw: dict[str, object] = {
        "model_type": "bailing_hybrid",
        "attention_dropout": 0.0,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_id)
        if isinstance(config.eos_token_id, tuple)
        else config.eos_token_id,
        "first_k_dense_replace": config.first_k_dense_replace,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "initializer_range": config.initializer_range,
        "intermediate_size": config.intermediate_size,
        "kda_lower_bound": config.kda_lower_bound,
        "kda_safe_gate": config.kda_safe_gate,
        "kv_lora_rank": config.kv_lora_rank,
        "layer_group_size": config.layer_group_size,
        "moe_intermediate_size": config.moe_intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_experts": config.num_experts,
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": config.num_attention_heads,
        "num_nextn_predict_layers": config.num_mtp_layers,
        "num_shared_experts": config.num_shared_experts,
        "pad_token_id": config.pad_token_id,
        "q_lora_rank": config.q_lora_rank,
        "qk_head_dim": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "qk_nope_head_dim": config.qk_nope_head_dim,
        "qk_rope_head_dim": config.qk_rope_head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "routed_scaling_factor": config.routed_scaling_factor,
        "short_conv_kernel_size": config.conv_width,
        "tie_word_embeddings": False,
        "topk_group": config.topk_group,
        "v_head_dim": config.v_head_dim,
        "vocab_size": config.vocab_size,
        "expert_swiglu_limit_list": _limit_list(config.expert_swiglu_limits),
        "share_expert_swiglu_limit_list": _limit_list(config.shared_swiglu_limits),
    }
    if config.num_shared_experts:
        raw["moe_shared_expert_intermediate_size"] = (
            config.shared_intermediate_size // config.num_shared_experts
        )
    match layout:
        case "hub":
            raw |= {
                "architectures": ["BailingMoeV3ForCausalLM"],
                "head_dim": config.kda_head_dim,
                "max_position_embeddings": config.max_position_embeddings,
                "norm_topk_prob": config.norm_topk_prob,
                "n_group": config.n_group,
                "num_experts_per_tok": config.num_experts_per_tok,
                "score_function": "sigmoid",
                "moe_router_enable_expert_bias": True,
                "gated_attention_proj_granularity_type": "head_wise",
                "rope_interleave": True,
                "rope_scaling": None,
                "torch_dtype": dtype,
            }
            # of an incomplete last group the hub's rule and transformers' derive different kinds
            if types != config.default_layer_types() or config.num_hidden_layers % config.layer_group_size:
                raw["layer_types"] = list(types)
            if config.mlp_types != _default_mlp_types(config.num_hidden_layers, config.first_k_dense_replace):
                raw["mlp_layer_types"] = list(config.mlp_types)
        case "save_pretrained":
            raw |= {
                "architectures": ["BailingHybridForCausalLM"],
                "head_dim": config.qk_rope_head_dim,
                "linear_head_dim": config.kda_head_dim,
                "linear_num_heads": config.num_attention_heads,
                "linear_conv_kernel_dim": config.conv_width,
                "model_max_length": config.max_position_embeddings,
                "moe_renormalize": config.norm_topk_prob,
                "num_expert_group": config.n_group,
                "num_experts_per_token": config.num_experts_per_tok,
                "layer_types": list(types),
                "mlp_layer_types": list(config.mlp_types),
                "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
                "dtype": dtype,
            }
    return dict(sorted(raw.items()))


def _default_mlp_types(num_layers: int, first_dense: int) -> tuple[MlpType, ...]:
    return tuple("dense" if i < first_dense else "sparse" for i in range(num_layers))


def _limit_list(limits: tuple[float | None, ...] | None) -> list[float | None] | None:
    return None if limits is None else list(limits)
