"""`LossSemantics`: which normalization a run uses, as data."""

import dataclasses

from ._router import LoadBalanceScope
from ._weights import Granularity, ScaleDenominator

_COEFFICIENTS = (
    "mtp_loss_scaling_factor",
    "moe_z_loss_weight",
    "load_balance_loss_weight",
    "z_loss_multiplier",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossSemantics:
    """The normalization of every loss term. Defaults are RFC-0032's rules.

    The rules depend on masks and group ids of the global batch only, so the objective is the same
    for any cut of the batch into micro-steps and shards. Names are those of Megatron-LM and MaxText.

    Attributes:
        calculate_per_token_loss: True gives every scored token one vote; False every micro-batch
            (every row when `micro_batch_size` is 1).
        micro_batch_size: Rows of a micro-batch, at least 1.
        mtp_per_layer_loss_norm: True divides each MTP depth by its own count and averages over
            depths; False pools all depths (MaxText). Overridden by `calculate_per_token_loss=True`.
        mtp_loss_scaling_factor: Weight of the MTP term, at least 0.
        mtp_roll_across_documents: True lets MTP targets cross document ends (Megatron without
            packed-sequence parameters).
        moe_z_loss_weight: Router z-loss coefficient of each MoE layer, at least 0.
        load_balance_loss_weight: Load-balance coefficient, at least 0.
        load_balance_scope: Positions over which load statistics are taken.
        load_balance_layer_mean: True averages the load-balance term over layers (MaxText);
            False sums it (Megatron).
        z_loss_multiplier: Coefficient of the lm-head z term, at least 0; 0 is off.
        mask_padding_in_router_losses: True leaves padding out of router terms.
        count_empty: True counts groups without a scored token in the mean over groups.
        scale_denominator: With fractional token weights, what a mean divides by.
        train_lm: False sets the lm objective and its z term to exactly 0 and leaves every log as
            it is (dense warm-up of an attention indexer).
    """

    calculate_per_token_loss: bool
    micro_batch_size: int = 1
    mtp_per_layer_loss_norm: bool = True
    mtp_loss_scaling_factor: float = 0.1
    mtp_roll_across_documents: bool = False
    moe_z_loss_weight: float = 0.0
    load_balance_loss_weight: float = 0.0
    load_balance_scope: LoadBalanceScope = LoadBalanceScope.MICRO_BATCH
    load_balance_layer_mean: bool = False
    z_loss_multiplier: float = 0.0
    mask_padding_in_router_losses: bool = False
    count_empty: bool = True
    scale_denominator: ScaleDenominator = "sum"
    train_lm: bool = True

    def __post_init__(self) -> None:
        if self.micro_batch_size < 1:
            raise ValueError(f"micro_batch_size must be at least 1, got {self.micro_batch_size}")
        for name in _COEFFICIENTS:
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise ValueError(f"{name} must be finite and >= 0, got {value}; use 0 to turn the term off")
        if self.scale_denominator not in ("sum", "count"):
            raise ValueError(f"scale_denominator must be 'sum' or 'count', got {self.scale_denominator!r}")

    @property
    def granularity(self) -> Granularity:
        """Granularity of the lm term."""
        return Granularity.TOKEN if self.calculate_per_token_loss else self.group_granularity

    @property
    def group_granularity(self) -> Granularity:
        """The group whose mean Megatron logs for MTP and router terms."""
        return Granularity.SAMPLE if self.micro_batch_size == 1 else Granularity.MICRO_BATCH

    @property
    def is_megatron_pair(self) -> bool:
        """False for the one pair of flags that no Megatron run has.

        (`calculate_per_token_loss=False`, `mtp_per_layer_loss_norm=False`) pools MTP over tokens
        while lm is averaged over micro-batches.
        """
        return self.calculate_per_token_loss or self.mtp_per_layer_loss_norm
