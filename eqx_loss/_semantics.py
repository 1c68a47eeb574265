"""`LossSemantics`: which normalization a run uses, as data."""

import dataclasses

from ._release_rules import (
    AuxiliaryShare,
    EmptyGroup,
    LmMean,
    MicroStepRules,
    ReleaseRules,
    megatron_rules,
)
from ._router import LoadBalanceScope
from ._weights import Granularity, ScaleDenominator

MAXTEXT_RELEASES = ("0.2.4", "0.2.5", "rfc-0032")

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
        rules: What a release of another framework does differently; None is our own. Set it with
            `megatron`, `maxtext`, `hf_trainer`, `torchtitan` or `levanter`.
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
    rules: ReleaseRules | None = None

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

    @classmethod
    def megatron(
        cls,
        release: str,
        *,
        calculate_per_token_loss: bool,
        micro_batch_size: int = 1,
        context_parallel_size: int = 1,
        packed_sequences: bool = False,
    ) -> "LossSemantics":
        """Megatron-Core, release "0.12" to "0.19" (or a patch release) or "main", warts included.

        lm: per (micro-batch, context rank) or per token. MTP: its own counts per (micro-batch,
        context rank), or the lm count, locally rescaled from 0.17; empty micro-batches are NaN
        before 0.17. Router z and load balance: per micro-batch, or by router positions over lm
        tokens. Printed logs, some of them of one rank: `megatron_logs`. The rules and their
        source files are those of `megatron_rules`; run `python -m eqx_loss explain --profile
        megatron --release 0.16` to read them. Set coefficients with `dataclasses.replace`.

        Args:
            release: Release; "0.16.1" is "0.16".
            calculate_per_token_loss: Megatron's flag of the same name.
            micro_batch_size: Rows of a micro-batch.
            context_parallel_size: Context ranks.
            packed_sequences: True when documents are given by `packed_seq_params` (SFT): MTP then
                stops at document ends (from 0.16) and context ranks cut every document.

        Raises:
            ValueError: The release is unknown, or a size is below 1.
        """
        rules = megatron_rules(
            release, context_parallel_size=context_parallel_size, packed_sequences=packed_sequences
        )
        return cls(
            calculate_per_token_loss=calculate_per_token_loss,
            micro_batch_size=micro_batch_size,
            mtp_roll_across_documents=not (packed_sequences and rules.mtp_shift_documents),
            rules=rules,
        )

    @classmethod
    def maxtext(cls, release: str, *, calculate_per_token_loss: bool = True) -> "LossSemantics":
        """MaxText "0.2.4", "0.2.5", or the fork that RFC-0032 describes ("rfc-0032").

        All: lm by the global token count (`xent_sum / total_weights`). Upstream MTP pools depths
        and positions of a micro-step, load balance is per sequence, averaged over layers, and
        there is no router z-loss. Under accumulation upstream adds these means to a token sum that
        is later divided by all tokens: 0.2.4 as they are (G / tokens of what was meant), 0.2.5
        times the micro-step's tokens (right only for equal counts); logged MTP and z terms of
        0.2.4 and the z term of 0.2.5 are G times too large. Micro-steps are strided rows:
        `BatchLayout.strided`. RFC-0032 has none of this and equals our default.

        The weights give every ratio of the measured table that depends on counts alone. Two rows
        depend on the measured model too: the load-balance gradient of 0.2.5 (x 0.72) on padding,
        which its router sees as one repeated token, and the norms under extreme counts (x 0.028
        and 5 %) on the size of gradients at the first tokens of a row: one fitted size, 0.75 of the
        others', gives all four numbers of that row. The fit is ours, not observed in MaxText.
        `tests/eqx_loss/test_profiles_maxtext.py` has both.

        Source: MaxText 0.2.4 and 0.2.5, `maxtext/trainers/pre_train/train.py` (`loss_fn`),
        `maxtext/utils/gradient_accumulation.py`, `maxtext/layers/multi_token_prediction.py`
        (`calculate_mtp_loss`). Upstream adds 1e-8 to denominators; not reproduced.

        Args:
            release: One of the three.
            calculate_per_token_loss: The fork's flag; upstream has only True.

        Raises:
            ValueError: The release is unknown, or upstream is asked for False.
        """
        if release not in MAXTEXT_RELEASES:
            raise ValueError(f"MaxText release must be one of {', '.join(MAXTEXT_RELEASES)}, got {release!r}")
        if release == "rfc-0032":
            return cls(calculate_per_token_loss=calculate_per_token_loss)
        if not calculate_per_token_loss:
            raise ValueError(
                f"MaxText {release} always divides by the global token count, got "
                "calculate_per_token_loss=False; use release 'rfc-0032'"
            )
        old = release == "0.2.4"
        return cls(
            calculate_per_token_loss=True,
            mtp_per_layer_loss_norm=False,
            load_balance_scope=LoadBalanceScope.SEQUENCE,
            load_balance_layer_mean=True,
            rules=MicroStepRules(
                framework="MaxText",
                release=release,
                lm_mean=LmMean.GLOBAL,
                auxiliary_share=AuxiliaryShare.OVER_TOKENS if old else AuxiliaryShare.TOKENS,
                log_divides_auxiliary=not old,
            ),
        )

    @classmethod
    def hf_trainer(
        cls, *, num_items_in_batch: bool = True, average_tokens_across_devices: bool = True
    ) -> "LossSemantics":
        """Hugging Face `Trainer` (transformers 5.24.0) with a causal language model.

        `num_items_in_batch=True` (models that accept loss keyword arguments): `sum / items` with
        the items of all micro-steps, of all ranks or (`average_tokens_across_devices=False`) of
        each rank. False: the mean of each micro-step's mean, NaN when one has no label. A router
        auxiliary loss is added to each micro-step's loss; with `num_items_in_batch` it is not
        divided by the accumulation steps. Its value is per micro-step of a rank, layers pooled
        and `num_experts_per_tok` times Switch's: fold both into `load_balance_loss_weight`.

        Source: `transformers/trainer.py` (`training_step`, `compute_loss`,
        `_get_num_items_in_batch`), `transformers/loss/loss_utils.py` (`fixed_cross_entropy`),
        `transformers/models/mixtral/modeling_mixtral.py` (`load_balancing_loss_func`).
        """
        mean = LmMean.MICRO_STEP
        if num_items_in_batch:
            mean = LmMean.GLOBAL if average_tokens_across_devices else LmMean.RANK
        return cls(
            calculate_per_token_loss=num_items_in_batch,
            mtp_loss_scaling_factor=0.0,
            rules=MicroStepRules(
                framework="Hugging Face Trainer",
                release="5.24.0",
                lm_mean=mean,
                auxiliary_share=AuxiliaryShare.WHOLE if num_items_in_batch else AuxiliaryShare.EQUAL,
                empty=EmptyGroup.NAN,
            ),
        )

    @classmethod
    def torchtitan(cls) -> "LossSemantics":
        """TorchTitan 0.3.0: sums over the global batch divided by its valid tokens.

        lm: `sum(xent) / global_valid_tokens`. MTP: `mtp_scale (0.3) / depths` times each depth's
        sum over the same lm count, stopping at document ends. Independent of ranks and
        accumulation. No auxiliary router loss (expert bias only). A step without a valid token is
        0 / 0 there and 0 here.

        Source: `torchtitan/components/loss.py` (`CrossEntropyLoss`), `torchtitan/trainer.py`
        (`global_valid_tokens`), `torchtitan/models/deepseek_v3/mtp.py` (`MTPLoss`).
        """
        return cls(calculate_per_token_loss=True, mtp_loss_scaling_factor=0.3)

    @classmethod
    def levanter(cls) -> "LossSemantics":
        """Levanter 1.1: mean over accumulation steps of each step's token mean.

        `hax.mean(where=loss_mask)` over the rows of all devices in a micro-step, so ranks do not
        matter; steps have equal votes whatever their token counts. A step without a scored token
        is NaN. No MTP, no router loss.

        Source: `levanter/models/lm_model.py` (`compute_loss`), `levanter/grad_accum.py`
        (`accumulate_gradients_sharded`).
        """
        return cls(
            calculate_per_token_loss=False,
            mtp_loss_scaling_factor=0.0,
            rules=MicroStepRules(
                framework="Levanter",
                release="1.1",
                lm_mean=LmMean.MICRO_STEP,
                auxiliary_share=AuxiliaryShare.EQUAL,
                empty=EmptyGroup.NAN,
            ),
        )
