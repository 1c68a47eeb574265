"""The MTP term in words and formulas."""

from .._release_rules import EmptyGroup, LogRanks, MegatronRules, MicroStepRules, MtpDivisor
from .._semantics import LossSemantics
from ._explanation import NEW_GROUPS, NOTHING, TermExplanation, auxiliary_log, auxiliary_mean, group_name

MTP_LOG = "per depth: mean over groups of [sum(m_k l_k) / n_k], without lambda"


def mtp_term(semantics: LossSemantics, depths: int) -> TermExplanation:
    """The multi-token-prediction term of `depths` depths, at least 1."""
    factor = semantics.mtp_loss_scaling_factor
    match semantics.rules:
        case None:
            return _clean_mtp(semantics, factor, depths)
        case MegatronRules() as rules:
            return _megatron_mtp(semantics, rules, factor, depths)
        case MicroStepRules() as rules:
            return _micro_step_mtp(semantics, rules, factor, depths)


def _clean_mtp(semantics: LossSemantics, factor: float, depths: int) -> TermExplanation:
    grouped = False
    if semantics.calculate_per_token_loss:
        objective = f"lambda/{depths} sum over k of [sum(m_k l_k) / N]"
        divided = "each depth's sum by the lm token count, not by its own; averaged over depths"
        coefficient = factor / depths
    elif semantics.mtp_per_layer_loss_norm:
        objective = f"lambda/{depths} sum over k of 1/G sum over groups of [sum(m_k l_k) / n_k]"
        divided = f"each depth's sum in a {group_name(semantics)} by its own tokens there; the means by G and depths"
        coefficient, grouped = factor / depths, True
    else:
        objective = "lambda sum_k sum(m_k l_k) / sum_k sum(m_k)"
        divided = "the sum over all depths by their tokens, pooled"
        coefficient = factor
    return TermExplanation(
        name="mtp",
        objective=objective,
        divided=divided,
        coefficient=coefficient,
        log=MTP_LOG + "; 0 for an empty group",
        micro_batch_size=NEW_GROUPS if grouped else NOTHING,
        notes=("a target in another document is not scored",) * (not semantics.mtp_roll_across_documents),
    )


def _megatron_mtp(
    semantics: LossSemantics, rules: MegatronRules, factor: float, depths: int
) -> TermExplanation:
    notes = [
        "targets cross document ends"
        if semantics.mtp_roll_across_documents
        else "a target in another document is not scored"
    ]
    if not rules.mtp_shift_context:
        notes.append("targets are not shifted across context ranks: not usable with context parallelism")
    if semantics.calculate_per_token_loss:
        rescaled = rules.mtp_divisor is MtpDivisor.RESCALED
        objective = f"lambda/{depths} sum over k of sum(m_k l_k) / N"
        divided = "each depth's sum by the lm token count, not by its own"
        if rescaled:
            objective = f"lambda/{depths} sum over k and groups of [sum(m_k l_k) n / max(n_k, 1)] / N"
            divided = "each group's sum by its own tokens n_k, times its lm tokens n, by the lm token count"
        cut = "the groups of the rescale n / n_k" if rescaled else NOTHING
    else:
        objective = f"lambda/{depths} sum over k of 1/G sum over groups of [sum(m_k l_k) / n_k]"
        divided = "each depth's sum in a (micro-batch, context rank) by its own tokens there"
        cut = NEW_GROUPS
        if rules.empty_mtp is EmptyGroup.NAN:
            notes.append("a group with n_k = 0 makes every gradient NaN, even with lambda = 0")
    if rules.empty_mtp_log is EmptyGroup.NAN:
        notes.append("a group with n_k = 0 makes the log NaN, under both flags")
    if rules.mtp_log_ranks is LogRanks.CONTEXT:
        notes.append("the log is one data rank's")
    return TermExplanation(
        name="mtp",
        objective=objective,
        divided=divided,
        coefficient=factor / depths,
        log=MTP_LOG,
        world_size=NOTHING if cut == NOTHING else "data ranks: nothing; context ranks: the groups",
        accumulation="nothing at a fixed micro-batch size",
        micro_batch_size=cut,
        notes=tuple(notes),
    )


def _micro_step_mtp(
    semantics: LossSemantics, rules: MicroStepRules, factor: float, depths: int
) -> TermExplanation:
    pooled = not semantics.mtp_per_layer_loss_norm
    mean = "sum_k sum(m_k l_k) / sum_k n_k" if pooled else f"1/{depths} sum_k sum(m_k l_k) / n_k"
    formula, effect, note = auxiliary_mean(rules, mean)
    return TermExplanation(
        name="mtp",
        objective=f"lambda {formula}",
        divided="each micro-step's sum by its own tokens" + (", depths pooled" if pooled else ""),
        coefficient=factor,
        log=auxiliary_log(rules),
        accumulation=effect,
        micro_batch_size=effect,
        notes=(note,),
    )
