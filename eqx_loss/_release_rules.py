"""What releases of other frameworks do differently from our rules, as data.

A `LossSemantics` without rules is ours. With `MegatronRules` or `MicroStepRules` it reproduces a
release, known wrong behaviour included. Sources are named at each rule; the table of Megatron
releases was confirmed by running them (`tests/golden/megatron`).
"""

import dataclasses
import enum
from collections.abc import Callable
from typing import TypeVar

Rule = TypeVar("Rule")


class EmptyGroup(enum.Enum):
    """What a mean over a group without scored tokens is.

    Attributes:
        NAN: 0 / 0, in value and gradient.
        ZERO: 0.
        CLAMP: Divided by `max(count, 1)`: 0 too, but a fractional count below 1 divides by 1.
    """

    NAN = "nan"
    ZERO = "zero"
    CLAMP = "clamp"


class LmGroup(enum.Enum):
    """Over what Megatron averages the lm loss with `calculate_per_token_loss=False`."""

    MICRO_BATCH = "micro_batch"
    MICRO_BATCH_AND_CONTEXT = "micro_batch_and_context"


class MtpDivisor(enum.Enum):
    """What Megatron divides MTP by with `calculate_per_token_loss=True`.

    Attributes:
        LM_TOKENS: The global lm token count: `sum(S_k) / T`.
        RESCALED: The same after a local rescale: `sum(S_k n / max(n_k, 1)) / T`, with `n` and
            `n_k` of one (micro-batch, context rank). Depends on how the batch is cut.
    """

    LM_TOKENS = "lm_tokens"
    RESCALED = "rescaled"


class RouterPadding(enum.Enum):
    """Which routers see the padding mask."""

    NONE = "none"
    DECODER = "decoder"
    DECODER_AND_MTP = "decoder_and_mtp"


class ContextFactor(enum.Enum):
    """Where Megatron makes up for router terms being averaged over context ranks.

    Attributes:
        NEVER: Router terms are 1 / context_parallel_size too small (before 0.16).
        GROUP_MEANS: Right with `calculate_per_token_loss=False`, too small with True (0.16 to 0.18).
        ALWAYS: Right (from 0.19).
    """

    NEVER = "never"
    GROUP_MEANS = "group_means"
    ALWAYS = "always"


class SequenceTokens(enum.Enum):
    """By how many tokens Megatron multiplies `seq_aux_loss` with `calculate_per_token_loss=True`.

    Attributes:
        MICRO_BATCH: Those of the micro-batch.
        SEQUENCE: Those of one sequence: micro_batch_size times too small (0.16 to 0.18).
    """

    MICRO_BATCH = "micro_batch"
    SEQUENCE = "sequence"


class LogRanks(enum.Enum):
    """Over which ranks a printed log is reduced.

    Attributes:
        LOCAL: Not at all: the printing rank's own value.
        CONTEXT: Context ranks; local to the data rank.
        DATA: Data ranks; local to the context rank.
        DATA_AND_CONTEXT: All.
    """

    LOCAL = "local"
    CONTEXT = "context"
    DATA = "data"
    DATA_AND_CONTEXT = "data_and_context"


class Assignments(enum.Enum):
    """Which assignments `f` of the load balance counts; the caller passes them.

    Attributes:
        ROUTED: The actual routing, with expert bias and groups.
        TOP_K: The plain top-k of the scores.
    """

    ROUTED = "routed"
    TOP_K = "top_k"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MegatronRules:
    """One release of Megatron-Core. Build it with `megatron_rules`.

    Attributes:
        release: "0.12" to "0.19" or "main".
        context_parallel_size: Context ranks, at least 1.
        packed_sequences: True when documents are given by `packed_seq_params`.
        lm_group: Group of the lm mean.
        empty_lm: lm mean of an empty group.
        mtp_divisor: MTP with `calculate_per_token_loss=True`.
        empty_mtp: MTP mean of an empty group in the gradient (`=False`).
        empty_mtp_log: The same in the log.
        mtp_shift_documents: True if MTP shifts stop at the ends of packed documents.
        mtp_shift_context: True if MTP shifts work across context ranks.
        router_padding: Which routers see the padding mask.
        context_factor: Scale of router terms under context parallelism.
        sequence_tokens: Scale of `seq_aux_loss` with `calculate_per_token_loss=True`.
        global_load_balance: True if `global_aux_loss` exists.
        mtp_log_ranks: Reduction of the MTP logs.
        router_z_log_ranks: Reduction of the z-loss log.
        load_balance_log_ranks: Reduction of the load-balance log.
        log_counts_mtp_layers: True if router logs divide by all layers, False by decoder layers.
        assignments: What `f` counts.
    """

    release: str
    context_parallel_size: int = 1
    packed_sequences: bool = False
    lm_group: LmGroup = LmGroup.MICRO_BATCH_AND_CONTEXT
    empty_lm: EmptyGroup = EmptyGroup.CLAMP
    mtp_divisor: MtpDivisor = MtpDivisor.RESCALED
    empty_mtp: EmptyGroup = EmptyGroup.CLAMP
    empty_mtp_log: EmptyGroup = EmptyGroup.CLAMP
    mtp_shift_documents: bool = True
    mtp_shift_context: bool = True
    router_padding: RouterPadding = RouterPadding.DECODER_AND_MTP
    context_factor: ContextFactor = ContextFactor.ALWAYS
    sequence_tokens: SequenceTokens = SequenceTokens.MICRO_BATCH
    global_load_balance: bool = True
    mtp_log_ranks: LogRanks = LogRanks.DATA_AND_CONTEXT
    router_z_log_ranks: LogRanks = LogRanks.DATA_AND_CONTEXT
    load_balance_log_ranks: LogRanks = LogRanks.DATA_AND_CONTEXT
    log_counts_mtp_layers: bool = True
    assignments: Assignments = Assignments.TOP_K

    def __post_init__(self) -> None:
        if self.context_parallel_size < 1:
            raise ValueError(f"context_parallel_size must be at least 1, got {self.context_parallel_size}")


class LmMean(enum.Enum):
    """Over what a framework averages the lm loss.

    Attributes:
        GLOBAL: The tokens of the global batch.
        RANK: The tokens of each data rank, all its micro-steps pooled; ranks have equal votes.
        MICRO_STEP: The tokens of each micro-step of each rank; these have equal votes.
    """

    GLOBAL = "global"
    RANK = "rank"
    MICRO_STEP = "micro_step"


class AuxiliaryShare(enum.Enum):
    """How the auxiliary means of `G` micro-steps are combined in the gradient.

    Attributes:
        EQUAL: `1 / G` each.
        TOKENS: By the micro-step's share of the scored tokens (MaxText 0.2.5).
        OVER_TOKENS: Each divided by the global token count: G / tokens of what was meant
            (MaxText 0.2.4).
        WHOLE: Added: G times what was meant (Hugging Face with `num_items_in_batch`).
    """

    EQUAL = "equal"
    TOKENS = "tokens"
    OVER_TOKENS = "over_tokens"
    WHOLE = "whole"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MicroStepRules:
    """A framework that forms its loss micro-step by micro-step.

    Attributes:
        framework: Name for messages and tables.
        release: Its release.
        lm_mean: Group of the lm mean.
        auxiliary_share: Combination of auxiliary means, when there is more than one micro-step.
        empty: Mean of an empty group.
        log_divides_auxiliary: True if logged auxiliary terms are means over micro-steps, False if
            they are sums (G times too large).
    """

    framework: str
    release: str
    lm_mean: LmMean
    auxiliary_share: AuxiliaryShare
    empty: EmptyGroup = EmptyGroup.ZERO
    log_divides_auxiliary: bool = True


ReleaseRules = MegatronRules | MicroStepRules

MEGATRON_RELEASES = ("0.12", "0.13", "0.14", "0.15", "0.16", "0.17", "0.18", "0.19", "main")


def megatron_rules(
    release: str, *, context_parallel_size: int = 1, packed_sequences: bool = False
) -> MegatronRules:
    """The rules of one release of Megatron-Core.

    A patch release has those of its minor release. `main` was read and run at d98e8a64
    (2026-08-22) and equals 0.19. Sources, all under `megatron/core`: `pipeline_parallel/schedules.py`
    (`forward_step_calc_loss`), `distributed/finalize_model_grads.py`, `models/gpt/gpt_model.py` or
    `transformer/multi_token_prediction.py` (MTP), `transformer/moe/router.py` and `moe_utils.py`.
    Changes: 1aef9f8eff (lm clamp), 3806ec2754 (lm under context parallelism), d7500d4d2a (MTP
    clamp), a22c40e8d6 (MTP rescale), 08abeedbfe (MTP and load-balance logs), 8c4df6b077 (packed
    shift), f6e0d425a5 (router scale), 71c49b56da and e3fe5508c9 (seq_aux_loss, padding mask),
    9ef8a2a420 (router token factor), 848bff1bc7, 873678adaf, 4abeecce74 (z-loss log).

    Raises:
        ValueError: An unknown release, or `context_parallel_size` below 1.
    """
    minor = megatron_minor(release)
    age = MEGATRON_RELEASES.index(minor)

    def since(name: str) -> bool:
        return age >= MEGATRON_RELEASES.index(name)

    return MegatronRules(
        release=minor,
        context_parallel_size=context_parallel_size,
        packed_sequences=packed_sequences,
        lm_group=LmGroup.MICRO_BATCH_AND_CONTEXT if since("0.13") else LmGroup.MICRO_BATCH,
        empty_lm=EmptyGroup.CLAMP if since("0.15") else EmptyGroup.NAN,
        mtp_divisor=MtpDivisor.RESCALED if since("0.17") else MtpDivisor.LM_TOKENS,
        empty_mtp=EmptyGroup.CLAMP if since("0.17") else EmptyGroup.NAN,
        empty_mtp_log=_by_age(since, (("0.18", EmptyGroup.CLAMP), ("0.17", EmptyGroup.ZERO)), EmptyGroup.NAN),
        mtp_shift_documents=since("0.16"),
        mtp_shift_context=since("0.14"),
        router_padding=_by_age(
            since,
            (("0.18", RouterPadding.DECODER_AND_MTP), ("0.16", RouterPadding.DECODER)),
            RouterPadding.NONE,
        ),
        context_factor=_by_age(
            since, (("0.19", ContextFactor.ALWAYS), ("0.16", ContextFactor.GROUP_MEANS)), ContextFactor.NEVER
        ),
        sequence_tokens=SequenceTokens.SEQUENCE
        if since("0.16") and not since("0.19")
        else SequenceTokens.MICRO_BATCH,
        global_load_balance=since("0.15"),
        mtp_log_ranks=LogRanks.DATA_AND_CONTEXT if since("0.14") else LogRanks.CONTEXT,
        router_z_log_ranks=_by_age(
            since,
            (
                ("0.19", LogRanks.DATA_AND_CONTEXT),
                ("0.18", LogRanks.DATA),
                ("0.16", LogRanks.LOCAL),
                ("0.14", LogRanks.DATA_AND_CONTEXT),
            ),
            LogRanks.LOCAL,
        ),
        load_balance_log_ranks=LogRanks.DATA_AND_CONTEXT if since("0.14") else LogRanks.CONTEXT,
        log_counts_mtp_layers=since("0.13"),
        assignments=Assignments.TOP_K if since("0.14") else Assignments.ROUTED,
    )


def megatron_minor(release: str) -> str:
    """The entry of `MEGATRON_RELEASES` that a release such as "0.16.1" or "main d98e8a64" belongs to.

    Raises:
        ValueError: There is none.
    """
    words = release.split()
    name = words[0] if words else ""
    if name == "main":
        return "main"
    minor = ".".join(name.removeprefix("core_").removeprefix("v").split(".")[:2])
    if minor not in MEGATRON_RELEASES:
        raise ValueError(
            f"Megatron release must be one of {', '.join(MEGATRON_RELEASES)} or a patch release of one, got "
            f"{release!r}; use 'main' for later ones"
        )
    return minor


def _by_age(since: Callable[[str], bool], changes: tuple[tuple[str, Rule], ...], first: Rule) -> Rule:
    """The rule of the newest change that the release has; `changes` newest first."""
    for name, rule in changes:
        if since(name):
            return rule
    return first
