"""The shape of a model, checked when it is built."""

import dataclasses
from typing import Literal

from ._layer_config import GqaConfig as GqaConfig
from ._layer_config import KdaConfig as KdaConfig
from ._layer_config import LightningConfig as LightningConfig
from ._layer_config import MlaConfig as MlaConfig
from ._layer_config import MoeConfig as MoeConfig
from ._layer_config import MtpConfig as MtpConfig
from ._layer_config import RopeConfig as RopeConfig
from ._layer_config import YarnConfig as YarnConfig
from ._layer_config import check_not_negative, check_positive
from ._layer_plan import FfnKind, MixerKind, StackPlan, plan_stack
from ._layer_plan import LayerPlan as LayerPlan
from ._quantized import Quantization, has_qwix

Dtype = Literal["bfloat16", "float32", "float64"]
Remat = Literal["none", "dots", "block", "offload"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A whole model.

    Attributes:
        vocab_size: V.
        hidden_size: D.
        num_layers: Layers of the main stack, MTP blocks apart.
        intermediate_size: F of a dense layer; None when every layer is MoE.
        layer_group_size: Layers of a group; the last one has full attention, the others linear attention.
            An incomplete last group has full attention only, as the released `bailing_moe_v3` code does.
        first_k_dense_replace: Leading layers with a dense feed-forward although `moe` is set.
        mla: Latent attention for the full-attention layers; exactly one of `mla` and `gqa` is set.
        gqa: Grouped-query attention for the full-attention layers.
        kda: Delta attention for the linear layers; one of `kda` and `lightning` when there are such layers.
        lightning: Lightning attention for the linear layers.
        moe: Experts; None makes every layer dense.
        mtp: Multi-token prediction; None for none.
        rope: Positions.
        tie_word_embeddings: The output head is the transposed embedding.
        rms_norm_eps: Epsilon of the block, final and MTP norms.
        initializer_range: Standard deviation of the normal initial weights.
        dtype: Compute dtype; parameters stay as they were made (float32).
        remat: What the backward pass keeps of a layer: "none" keeps all, "dots" the matrix products,
            "block" only the layer's input, "offload" the matrix products in host memory.
        quantization: "int8" or "fp8" runs the layers' matrix products in 8 bits, forward and to the gradient of their
            input, by qwix (the extra `quantize`); `model._quantized` says what stays. None for the compute dtype.
        fused_swiglu: On TPUs, multiply dense feed-forwards by gate and up in one kernel, which needs less of the memory
            bandwidth. Only with `remat` "block", for its products are made again in the backward pass.
        record_max_logits: Return each head's largest attention logit, for QK-clip.
        layer_types: Explicit mixer of every layer; None derives it from `layer_group_size`.
        ffn_types: Explicit feed-forward of every layer; None derives it from `first_k_dense_replace`.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    intermediate_size: int | None
    layer_group_size: int = 1
    first_k_dense_replace: int = 0
    mla: MlaConfig | None = None
    gqa: GqaConfig | None = None
    kda: KdaConfig | None = None
    lightning: LightningConfig | None = None
    moe: MoeConfig | None = None
    mtp: MtpConfig | None = None
    rope: RopeConfig = dataclasses.field(default_factory=RopeConfig)
    tie_word_embeddings: bool = False
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    dtype: Dtype = "bfloat16"
    remat: Remat = "none"
    quantization: Quantization | None = None
    fused_swiglu: bool = False
    record_max_logits: bool = False
    layer_types: tuple[MixerKind, ...] | None = None
    ffn_types: tuple[FfnKind, ...] | None = None

    def __post_init__(self) -> None:
        check_positive(self, "vocab_size", "hidden_size", "num_layers", "layer_group_size")
        check_not_negative(self, "rms_norm_eps", "initializer_range")
        if self.first_k_dense_replace < 0:
            raise ValueError(
                f"ModelConfig.first_k_dense_replace must be 0 or more, got {self.first_k_dense_replace}; use 0"
            )
        if (self.mla is None) == (self.gqa is None):
            raise ValueError("ModelConfig needs exactly one of mla and gqa; set one of them")
        for name in ("layer_types", "ffn_types"):
            kinds = getattr(self, name)
            if kinds is not None and len(kinds) != self.num_layers:
                raise ValueError(
                    f"ModelConfig.{name} must name num_layers={self.num_layers} layers, got {len(kinds)}; use null to "
                    "derive them"
                )
        if self.quantization is not None and not has_qwix():
            raise ValueError(
                f"ModelConfig.quantization={self.quantization} needs qwix, which is not installed; install the extra "
                "(pip install 'eqx-loss[quantize]'), or use null"
            )
        if self.fused_swiglu and (self.remat != "block" or self.quantization is not None):
            raise ValueError(
                "ModelConfig.fused_swiglu=true makes products of the compute dtype again in the backward pass, got "
                f"remat={self.remat!r} and quantization={self.quantization}; use remat='block' and null, or false"
            )
        self._check_parts()

    def _check_parts(self) -> None:
        plan = self.layer_plan
        if any(layer.mixer == "linear" for layer in plan) and (self.kda is None) == (self.lightning is None):
            raise ValueError(
                f"ModelConfig.layer_group_size={self.layer_group_size} makes linear-attention layers, which need "
                "exactly one of kda and lightning; set one of them, or layer_group_size=1"
            )
        if any(layer.ffn == "dense" for layer in plan):
            if self.intermediate_size is None:
                raise ValueError(
                    "ModelConfig.intermediate_size must be set when a layer is dense; give its width"
                )
            check_positive(self, "intermediate_size")
        if self.moe is None:
            if any(layer.ffn == "moe" for layer in plan):
                raise ValueError("ModelConfig.ffn_types names a moe layer but moe is not set; set moe")
            return
        for name in ("expert_swiglu_limits", "shared_swiglu_limits"):
            limits = getattr(self.moe, name)
            if limits is not None and len(limits) != self.num_layers:
                raise ValueError(
                    f"MoeConfig.{name} must have one number per layer, num_layers={self.num_layers}, "
                    f"got {len(limits)}; use inf for a layer without limit"
                )

    @property
    def layer_plan(self) -> tuple[LayerPlan, ...]:
        """Mixer and feed-forward of every main layer, in order."""
        return tuple(LayerPlan(mixer=self._mixer(i), ffn=self._ffn(i)) for i in range(self.num_layers))

    def _mixer(self, i: int) -> MixerKind:
        if self.layer_types is not None:
            return self.layer_types[i]
        whole = self.num_layers // self.layer_group_size * self.layer_group_size
        return "full" if (i + 1) % self.layer_group_size == 0 or i >= whole else "linear"

    def _ffn(self, i: int) -> FfnKind:
        if self.ffn_types is not None:
            return self.ffn_types[i]
        return "dense" if self.moe is None or i < self.first_k_dense_replace else "moe"

    @property
    def mtp_plan(self) -> LayerPlan:
        """Mixer and feed-forward of an MTP block: full attention, experts where the model has them."""
        return LayerPlan(mixer="full", ffn="dense" if self.moe is None else "moe")

    @property
    def num_mtp_layers(self) -> int:
        """M; 0 without MTP."""
        return 0 if self.mtp is None else self.mtp.num_layers

    @property
    def stack(self) -> StackPlan:
        """The main layers by kind, as they are stacked and compiled, and the order in which they run."""
        return plan_stack(self.layer_plan)
