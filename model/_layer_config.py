"""The shapes of a layer's parts: frozen dataclasses, checked when they are built."""

import dataclasses
import math
from typing import Literal


def check_positive(owner: object, *names: str) -> None:
    """Raise `ValueError` unless every named field of `owner` is at least 1."""
    for name in names:
        value = getattr(owner, name)
        if value < 1:
            raise ValueError(
                f"{type(owner).__name__}.{name} must be at least 1, got {value}; give a positive size"
            )


def check_not_negative(owner: object, *names: str) -> None:
    """Raise `ValueError` unless every named field of `owner` is finite and at least 0."""
    for name in names:
        value = getattr(owner, name)
        if not 0 <= value < math.inf:
            raise ValueError(
                f"{type(owner).__name__}.{name} must be finite and at least 0, got {value}; give such a number"
            )


def _check_even(owner: object, name: str) -> None:
    value = getattr(owner, name)
    if value % 2:
        raise ValueError(
            f"{type(owner).__name__}.{name} must be even (rope turns pairs), got {value}; add or drop one"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnConfig:
    """YaRN frequency interpolation (arXiv:2309.00071, section 3.2); the attention temperature stays 1.

    Attributes:
        factor: Context extension; frequencies below the ramp are divided by it.
        original_max_positions: Context length before the extension, positions.
        beta_fast: Rotations in the original context above which a frequency is kept.
        beta_slow: Rotations in the original context below which a frequency is divided by `factor`.
    """

    factor: float
    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    def __post_init__(self) -> None:
        check_positive(self, "original_max_positions")
        if not 1 <= self.factor < math.inf:
            raise ValueError(
                f"YarnConfig.factor must be at least 1 and finite, got {self.factor}; drop yarn to leave rope alone"
            )
        if not math.inf > self.beta_fast > self.beta_slow > 0:
            raise ValueError(
                f"YarnConfig needs beta_fast > beta_slow > 0, got {self.beta_fast} and {self.beta_slow}; swap them"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding: pair j of R turns by `position * theta ** (-2 j / R)`.

    Attributes:
        theta: Base of the geometric sequence of frequencies.
        yarn: Interpolation for a longer context, or None.
    """

    theta: float = 10000.0
    yarn: YarnConfig | None = None

    def __post_init__(self) -> None:
        if not 0 < self.theta < math.inf:
            raise ValueError(
                f"RopeConfig.theta must be positive and finite, got {self.theta}; 10000 is usual"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MlaConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1), as Ling-3 uses it.

    Attributes:
        num_heads: H.
        q_lora_rank: Q, width of the query latent; None means one direct query projection.
        kv_lora_rank: C, width of the key/value latent.
        qk_nope_head_dim: K, query/key dims of a head without rope.
        qk_rope_head_dim: R, query/key dims of a head with rope; the rope key is shared by the heads.
        v_head_dim: U.
        output_gate: Multiply each head's output by `sigmoid(x @ gate)` before the output projection.
        rope_interleaved: Pairs are (0, 1), (2, 3), ...; False pairs j with j + R/2.
        latent_norm_eps: Epsilon of the latent norms; the reference uses 1e-6 whatever `rms_norm_eps` is.
    """

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    output_gate: bool = True
    rope_interleaved: bool = True
    latent_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        check_positive(
            self, "num_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"
        )
        _check_even(self, "qk_rope_head_dim")
        if self.q_lora_rank is not None:
            check_positive(self, "q_lora_rank")
        check_not_negative(self, "latent_norm_eps")

    @property
    def softmax_scale(self) -> float:
        """Factor of the attention logits, `(K + R) ** -0.5`."""
        return (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class GqaConfig:
    """Grouped-query attention with rope on the first `rope_head_dim` dims of a head (pairs j, j + R/2).

    Attributes:
        num_heads: H query heads.
        num_kv_heads: Key/value heads; each serves `num_heads / num_kv_heads` query heads.
        head_dim: K.
        rope_head_dim: R, the leading dims that turn; the rest has no position.
        use_qk_norm: RMSNorm of every query and key head before rope.
        use_qkv_bias: Add a bias to the query, key and value projections.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_head_dim: int
    use_qk_norm: bool = False
    use_qkv_bias: bool = False

    def __post_init__(self) -> None:
        check_positive(self, "num_heads", "num_kv_heads", "head_dim", "rope_head_dim")
        _check_even(self, "rope_head_dim")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"GqaConfig.num_kv_heads must divide num_heads={self.num_heads}, got {self.num_kv_heads}; "
                "choose a divisor"
            )
        if self.rope_head_dim > self.head_dim:
            raise ValueError(
                f"GqaConfig.rope_head_dim must be at most head_dim={self.head_dim}, got {self.rope_head_dim}; lower it"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class KdaConfig:
    """Kimi Delta Attention (Kimi Linear, arXiv:2510.26692), as Ling-3 uses it.

    Attributes:
        num_heads: H.
        head_dim: K = U, query, key and value dims of a head.
        conv_kernel_size: W, taps of the depthwise causal convolution.
        lower_bound: Log-decay (nats per token) is `lower_bound * sigmoid(...)`; None is the softplus gate
            without bound.
    """

    num_heads: int
    head_dim: int
    conv_kernel_size: int = 4
    lower_bound: float | None = -5.0

    def __post_init__(self) -> None:
        check_positive(self, "num_heads", "head_dim", "conv_kernel_size")
        if self.lower_bound is not None and not -math.inf < self.lower_bound < 0:
            raise ValueError(
                f"KdaConfig.lower_bound must be negative and finite (log of a decay), got {self.lower_bound}; use -5.0"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LightningConfig:
    """Gated linear attention with a fixed decay per head (Lightning Attention, arXiv:2401.04658), as Ling-2.x uses it.

    Attributes:
        num_heads: H.
        head_dim: K = U.
        rope_head_dim: R, the leading dims that turn.
        use_qk_norm: RMSNorm of every query and key head before rope.
        num_norm_groups: Groups of the output norm; each covers `num_heads / num_norm_groups` heads.
    """

    num_heads: int
    head_dim: int
    rope_head_dim: int
    use_qk_norm: bool = True
    num_norm_groups: int = 1

    def __post_init__(self) -> None:
        check_positive(self, "num_heads", "head_dim", "rope_head_dim", "num_norm_groups")
        _check_even(self, "rope_head_dim")
        if self.num_heads % self.num_norm_groups:
            raise ValueError(
                f"LightningConfig.num_norm_groups must divide num_heads={self.num_heads}, got {self.num_norm_groups}; "
                "choose a divisor"
            )
        if self.rope_head_dim > self.head_dim:
            raise ValueError(
                f"LightningConfig.rope_head_dim must be at most head_dim={self.head_dim}, got {self.rope_head_dim}; "
                "lower it"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoeConfig:
    """Mixture of experts behind a group-limited router (DeepSeek-V3, arXiv:2412.19437, section 2.1.2). Dropless.

    Attributes:
        num_experts: E.
        num_experts_per_tok: A, experts each token is sent to.
        moe_intermediate_size: F of a routed expert.
        num_shared_experts: Experts every token passes; 0 for none. They are stored as one wide SwiGLU.
        shared_expert_intermediate_size: F of one shared expert; None is `moe_intermediate_size`.
        num_routing_groups: Groups the experts are split into; 1 for no limit.
        topk_routing_group: Groups a token may choose experts from.
        score_function: Router score of a logit.
        norm_topk_prob: Divide the chosen scores by (their sum + 1e-20).
        routed_scaling_factor: Factor of the routed experts' sum.
        use_router_bias: Keep a per-expert bias that takes part in the choice only.
        expert_swiglu_limits: Clamp of the routed experts' SwiGLU, one number per layer (inf for none), or None.
        shared_swiglu_limits: The same for the shared expert.
    """

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    num_shared_experts: int = 1
    shared_expert_intermediate_size: int | None = None
    num_routing_groups: int = 1
    topk_routing_group: int = 1
    score_function: Literal["sigmoid", "softmax"] = "sigmoid"
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    use_router_bias: bool = True
    expert_swiglu_limits: tuple[float, ...] | None = None
    shared_swiglu_limits: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        check_positive(self, "num_experts", "moe_intermediate_size", "num_routing_groups")
        if self.num_shared_experts < 0:
            raise ValueError(
                f"MoeConfig.num_shared_experts must be 0 or more, got {self.num_shared_experts}; use 0"
            )
        if self.shared_expert_intermediate_size is not None:
            check_positive(self, "shared_expert_intermediate_size")
        if self.num_experts % self.num_routing_groups:
            raise ValueError(
                f"MoeConfig.num_routing_groups must divide num_experts={self.num_experts}, "
                f"got {self.num_routing_groups}; choose a divisor"
            )
        if not 0 < self.topk_routing_group <= self.num_routing_groups:
            raise ValueError(
                f"MoeConfig.topk_routing_group must be in [1, num_routing_groups={self.num_routing_groups}], "
                f"got {self.topk_routing_group}; lower it"
            )
        check_not_negative(self, "routed_scaling_factor")
        reachable = self.num_experts // self.num_routing_groups * self.topk_routing_group
        if not 0 < self.num_experts_per_tok <= reachable:
            raise ValueError(
                f"MoeConfig.num_experts_per_tok must be in [1, {reachable}] (experts in the kept groups), "
                f"got {self.num_experts_per_tok}; lower it or keep more groups"
            )
        for name in ("expert_swiglu_limits", "shared_swiglu_limits"):
            limits = getattr(self, name)
            if limits is not None and any(math.isnan(x) or x <= 0 for x in limits):
                raise ValueError(
                    f"MoeConfig.{name} must be positive, got {limits}; use inf for a layer without limit"
                )

    @property
    def shared_intermediate_size(self) -> int:
        """F of the wide SwiGLU that holds all shared experts; 0 when there is none."""
        return self.num_shared_experts * (self.shared_expert_intermediate_size or self.moe_intermediate_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MtpConfig:
    """Multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2): one full-attention block per depth.

    Attributes:
        num_layers: M; depth k = 1..M predicts the token k + 1 ahead.
    """

    num_layers: int

    def __post_init__(self) -> None:
        check_positive(self, "num_layers")
