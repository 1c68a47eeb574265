"""The terms of a `LossSemantics` in words and formulas."""

import dataclasses

from .._release_rules import (
    AuxiliaryShare,
    ContextFactor,
    EmptyGroup,
    LmGroup,
    LmMean,
    LogRanks,
    MegatronRules,
    MicroStepRules,
    MtpDivisor,
    RouterPadding,
    SequenceTokens,
)
from .._router import LoadBalanceScope
from .._semantics import LossSemantics

NOTATION = (
    "m: loss mask; m_k: mask of MTP depth k (the target's own); l, l_k: cross-entropy of a token",
    "N: sum of m over the global batch; n, n_k: sums of m, m_k over one group; G: groups of the batch",
    "M: MTP depths; lse: logsumexp of the router logits; T: all counted router positions",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TermExplanation:
    """One term of the objective.

    Attributes:
        name: lm, lm_z, mtp, router_z or load_balance.
        objective: Formula of what is differentiated, coefficient included.
        divided: What is divided by what.
        coefficient: Effective factor in front of the mean or sum; 0 is off.
        log: Formula of what is logged.
        world_size: What more ranks with the same global batch change.
        accumulation: What another number of micro-steps changes.
        micro_batch_size: What another micro-batch size changes.
        notes: Further behaviour of the release.
    """

    name: str
    objective: str
    divided: str
    coefficient: float
    log: str
    world_size: str
    accumulation: str
    micro_batch_size: str
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explanation:
    """A semantics: its name and its terms."""

    title: str
    terms: tuple[TermExplanation, ...]


NOTHING = "nothing"
NEW_GROUPS = "the groups, so the weights of the tokens (not their sum)"


def explain_semantics(semantics: LossSemantics, *, num_mtp_layers: int = 1) -> Explanation:
    """Explains every term; terms with coefficient 0 are explained as if they were on.

    Args:
        semantics: What to explain.
        num_mtp_layers: MTP depths of the model, at least 0; 0 leaves MTP out.
    """
    terms = [_lm(semantics), _lm_z(semantics)]
    if num_mtp_layers > 0:
        terms.append(_mtp(semantics, num_mtp_layers))
    terms += [_router_z(semantics), _load_balance(semantics)]
    return Explanation(title=_title(semantics), terms=tuple(terms))


def _title(semantics: LossSemantics) -> str:
    flag = f"calculate_per_token_loss={str(semantics.calculate_per_token_loss).lower()}"
    match semantics.rules:
        case None:
            return f"our rules (RFC-0032), {flag}, micro_batch_size={semantics.micro_batch_size}"
        case MegatronRules() as rules:
            return (
                f"Megatron-Core {rules.release}, {flag}, micro_batch_size={semantics.micro_batch_size}, "
                f"context_parallel_size={rules.context_parallel_size}"
                f"{', packed sequences' if rules.packed_sequences else ''}"
            )
        case MicroStepRules() as rules:
            return f"{rules.framework} {rules.release}"


def _group(semantics: LossSemantics) -> str:
    return "row" if semantics.micro_batch_size == 1 else f"micro-batch of {semantics.micro_batch_size} rows"


def _lm(semantics: LossSemantics) -> TermExplanation:
    on = 1.0 if semantics.train_lm else 0.0
    log = "sum(m l) / N, under every flag"
    match semantics.rules:
        case None:
            return _clean_lm(semantics, on, log)
        case MegatronRules() as rules:
            return _megatron_lm(semantics, rules, on, log)
        case MicroStepRules() as rules:
            return _micro_step_lm(rules, on, log)


def _clean_lm(semantics: LossSemantics, on: float, log: str) -> TermExplanation:
    if semantics.calculate_per_token_loss:
        return TermExplanation(
            name="lm",
            objective="sum(m l) / N",
            divided="the sum over all scored tokens by their number",
            coefficient=on,
            log=log,
            world_size=NOTHING,
            accumulation=NOTHING,
            micro_batch_size=NOTHING,
        )
    empty = "counts in G" if semantics.count_empty else "is left out of G"
    return TermExplanation(
        name="lm",
        objective="1/G sum over groups of [sum(m l) / n]",
        divided=f"each {_group(semantics)}'s sum by its own tokens; the means by their number G",
        coefficient=on,
        log=log,
        world_size=NOTHING,
        accumulation=NOTHING,
        micro_batch_size=NEW_GROUPS,
        notes=(
            f"a group without tokens adds 0 and {empty}",
            "minus the log it is -Cov(n, mean loss) / E[n] over groups, logged as lm_estimator_gap",
        ),
    )


def _megatron_lm(semantics: LossSemantics, rules: MegatronRules, on: float, log: str) -> TermExplanation:
    notes = ["fractional loss weights: n and N are cast to int, the numerator is not"]
    log = f"{log}; NaN when N = 0"
    if semantics.calculate_per_token_loss:
        return TermExplanation(
            name="lm",
            objective="sum(m l) / max(N, 1)",
            divided="the sum over all scored tokens by their number",
            coefficient=on,
            log=log,
            world_size=NOTHING,
            accumulation=NOTHING,
            micro_batch_size=NOTHING,
            notes=tuple(notes),
        )
    by_rank = rules.lm_group is LmGroup.MICRO_BATCH_AND_CONTEXT
    if rules.empty_lm is EmptyGroup.NAN:
        notes.append("a group without tokens makes every gradient NaN (0 / 0)")
    else:
        notes.append("a group without tokens adds 0 and counts in G")
    group = f"(micro-batch of {semantics.micro_batch_size}, context rank)" if by_rank else "micro-batch"
    return TermExplanation(
        name="lm",
        objective="1/G sum over groups of [sum(m l) / max(n, 1)]",
        divided=f"each {group}'s sum by its own tokens; the means by their number G",
        coefficient=on,
        log=log,
        world_size="data ranks: nothing; context ranks: the groups" if by_rank else NOTHING,
        accumulation="nothing at a fixed micro-batch size",
        micro_batch_size=NEW_GROUPS,
        notes=tuple(notes),
    )


def _micro_step_lm(rules: MicroStepRules, on: float, log: str) -> TermExplanation:
    empty = "NaN without a scored token" if rules.empty is EmptyGroup.NAN else "0 without a scored token"
    match rules.lm_mean:
        case LmMean.GLOBAL:
            objective, divided = "sum(m l) / N", "the sum over all scored tokens by their number"
            world, steps = NOTHING, NOTHING
        case LmMean.RANK:
            objective = "mean over ranks of [sum(m l) / N of the rank]"
            divided = "each rank's sum over all micro-steps by its own tokens"
            world, steps = "the groups: one per rank", NOTHING
        case LmMean.MICRO_STEP:
            objective = "mean over micro-steps and ranks of [sum(m l) / n]"
            divided = "each micro-step's sum by its own tokens; the means by their number"
            world, steps = "the groups: one per micro-step and rank", "the groups: one per micro-step"
    return TermExplanation(
        name="lm",
        objective=objective,
        divided=divided,
        coefficient=on,
        log=log,
        world_size=world,
        accumulation=steps,
        micro_batch_size=steps,
        notes=(empty,),
    )


def _lm_z(semantics: LossSemantics) -> TermExplanation:
    lm = _lm(semantics)
    notes: tuple[str, ...] = ()
    if isinstance(semantics.rules, MicroStepRules) and semantics.rules.framework == "MaxText":
        notes = (
            "MaxText's logged lm_loss contains this term; its logged z_loss is the sum over micro-steps of "
            "their means: accumulation steps times too large",
        )
    return dataclasses.replace(
        lm,
        name="lm_z",
        objective=f"z_loss_multiplier x [{lm.objective}] with logsumexp(logits)^2 for l",
        coefficient=semantics.z_loss_multiplier * lm.coefficient,
        log="sum(m z) / N, without the multiplier, apart from lm",
        notes=notes,
    )


def _mtp(semantics: LossSemantics, depths: int) -> TermExplanation:
    factor = semantics.mtp_loss_scaling_factor
    match semantics.rules:
        case None:
            return _clean_mtp(semantics, factor, depths)
        case MegatronRules() as rules:
            return _megatron_mtp(semantics, rules, factor, depths)
        case MicroStepRules() as rules:
            return _micro_step_mtp(semantics, rules, factor, depths)


MTP_LOG = "per depth: mean over groups of [sum(m_k l_k) / n_k], without lambda"


def _clean_mtp(semantics: LossSemantics, factor: float, depths: int) -> TermExplanation:
    grouped = False
    if semantics.calculate_per_token_loss:
        objective = f"lambda/{depths} sum over k of [sum(m_k l_k) / N]"
        divided = "each depth's sum by the lm token count, not by its own; averaged over depths"
        coefficient = factor / depths
    elif semantics.mtp_per_layer_loss_norm:
        objective = f"lambda/{depths} sum over k of 1/G sum over groups of [sum(m_k l_k) / n_k]"
        divided = (
            f"each depth's sum in a {_group(semantics)} by its own tokens there; the means by G and depths"
        )
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
        world_size=NOTHING,
        accumulation=NOTHING,
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
    formula, effect, note = _shared(rules, mean)
    return TermExplanation(
        name="mtp",
        objective=f"lambda {formula}",
        divided="each micro-step's sum by its own tokens" + (", depths pooled" if pooled else ""),
        coefficient=factor,
        log=_auxiliary_log(rules),
        world_size=NOTHING,
        accumulation=effect,
        micro_batch_size=effect,
        notes=(note,),
    )


def _shared(rules: MicroStepRules, mean: str) -> tuple[str, str, str]:
    """Formula, what accumulation changes, and a remark, for auxiliary means of G micro-steps."""
    match rules.auxiliary_share:
        case AuxiliaryShare.EQUAL:
            return (
                f"1/G sum over micro-steps of [{mean}]",
                "the groups: one per micro-step",
                "steps have equal votes",
            )
        case AuxiliaryShare.TOKENS:
            return (
                f"sum over micro-steps of n/N [{mean}]",
                "micro-steps with more lm tokens count more",
                "equal to G = 1 only when all micro-steps have equally many tokens",
            )
        case AuxiliaryShare.OVER_TOKENS:
            return (
                f"1/N sum over micro-steps of [{mean}]",
                "with G > 1 the term is G / N of what was meant (it all but vanishes)",
                "a known fault: a mean is added to a sum that is then divided by all tokens",
            )
        case AuxiliaryShare.WHOLE:
            return (
                f"sum over micro-steps of [{mean}]",
                "the term grows with the number of micro-steps",
                "a known fault: G times what was meant",
            )


def _auxiliary_log(rules: MicroStepRules) -> str:
    if rules.log_divides_auxiliary:
        return "mean over micro-steps, coefficient included"
    return "sum over micro-steps, coefficient included: G times too large"


def _router_z(semantics: LossSemantics) -> TermExplanation:
    factor = semantics.moe_z_loss_weight
    log = "per layer: mean over groups of the group's mean of lse^2, without c_z"
    rules = semantics.rules
    notes: list[str] = ["every position counts, padding included, unless a padding mask is given"]
    world, batch = NOTHING, NOTHING
    if isinstance(rules, MicroStepRules):
        notes = [f"{rules.framework} {rules.release} has no router z-loss; these are our rules"]
    if isinstance(rules, MegatronRules):
        notes += _router_padding(rules)
        log = "mean over layers and micro-batches of lse^2, without c_z"
        log += {
            LogRanks.LOCAL: ", one rank's only",
            LogRanks.CONTEXT: ", averaged over context ranks",
            LogRanks.DATA: ", averaged over data ranks",
            LogRanks.DATA_AND_CONTEXT: ", averaged over all ranks",
        }[rules.router_z_log_ranks]
    short, world = _context_effect(semantics)
    notes += short
    if semantics.calculate_per_token_loss:
        return TermExplanation(
            name="router_z",
            objective="c_z sum over layers of [sum over T of lse^2 / max(N, 1)]" + _context_scale(semantics),
            divided="the sum over router positions by the lm token count: T/N times a mean",
            coefficient=factor * _context_factor(semantics),
            log=log,
            world_size=world,
            accumulation=NOTHING,
            micro_batch_size=NOTHING,
            notes=(*notes, "without a scored token in the step the sum is not divided at all"),
        )
    if semantics.mask_padding_in_router_losses:
        batch = NEW_GROUPS
    return TermExplanation(
        name="router_z",
        objective="c_z sum over layers of 1/G sum over groups of [mean of lse^2]" + _context_scale(semantics),
        divided="each group's sum by its positions; equal to the global mean unless padding is masked",
        coefficient=factor * _context_factor(semantics),
        log=log,
        world_size=world,
        accumulation=NOTHING,
        micro_batch_size=batch,
        notes=tuple(notes),
    )


def _router_padding(rules: MegatronRules) -> list[str]:
    match rules.router_padding:
        case RouterPadding.NONE:
            return ["the release has no padding mask for routers"]
        case RouterPadding.DECODER:
            return ["the padding mask reaches decoder routers; those of MTP layers count everything"]
        case RouterPadding.DECODER_AND_MTP:
            return ["the padding mask is shifted for MTP routers; its freed slot counts as no padding"]


def _context_factor(semantics: LossSemantics) -> float:
    """Share of a router term that context parallelism leaves."""
    rules = semantics.rules
    if not isinstance(rules, MegatronRules):
        return 1.0
    match rules.context_factor:
        case ContextFactor.ALWAYS:
            right = True
        case ContextFactor.GROUP_MEANS:
            right = not semantics.calculate_per_token_loss
        case ContextFactor.NEVER:
            right = False
    return 1.0 if right else 1 / rules.context_parallel_size


def _context_scale(semantics: LossSemantics) -> str:
    return "" if _context_factor(semantics) == 1.0 else " / context_parallel_size"


def _context_effect(semantics: LossSemantics) -> tuple[list[str], str]:
    rules = semantics.rules
    if not isinstance(rules, MegatronRules):
        return [], NOTHING
    single = dataclasses.replace(semantics, rules=dataclasses.replace(rules, context_parallel_size=2))
    if _context_factor(single) == 1.0:
        return [], NOTHING
    return ["router terms are 1 / context_parallel_size too small in this release and flag"], (
        "data ranks: nothing; context ranks: the term shrinks with their number"
    )


def _load_balance(semantics: LossSemantics) -> TermExplanation:
    rules = semantics.rules
    layers = "mean" if semantics.load_balance_layer_mean else "sum"
    unit = {
        LoadBalanceScope.MICRO_BATCH: "micro-batch",
        LoadBalanceScope.SEQUENCE: "sequence",
        LoadBalanceScope.GLOBAL_BATCH: "global batch",
    }[semantics.load_balance_scope]
    value = f"E sum_e f_e P_e of each {unit}"
    notes, world = _context_effect(semantics)
    steps, batch = (
        NOTHING,
        NEW_GROUPS if semantics.load_balance_scope is LoadBalanceScope.MICRO_BATCH else NOTHING,
    )
    if isinstance(rules, MicroStepRules):
        formula, steps, note = _shared(rules, f"mean over units of {value}")
        return TermExplanation(
            name="load_balance",
            objective=f"c_a {layers} over layers of {formula}",
            divided="each unit's scores by its positions, units by their number",
            coefficient=semantics.load_balance_loss_weight,
            log=_auxiliary_log(rules),
            world_size=NOTHING,
            accumulation=steps,
            micro_batch_size=steps,
            notes=(note,),
        )
    if isinstance(rules, MegatronRules):
        extra = _megatron_balance_notes(semantics, rules)
        notes += extra
        if semantics.load_balance_scope is LoadBalanceScope.GLOBAL_BATCH:
            world = "data ranks: f is counted over all of them; the gradient is their number times weaker than the log"
            steps = "f is the running mean over the micro-batches so far"
    if semantics.calculate_per_token_loss:
        objective = f"c_a {layers} over layers of [sum over units of positions x {value} / max(N, 1)]"
        divided = "each unit's value times its positions, by the lm token count"
    else:
        objective = f"c_a {layers} over layers of 1/units sum of [{value}]"
        divided = "each unit's scores by its positions, units by their number"
    return TermExplanation(
        name="load_balance",
        objective=objective + _context_scale(semantics),
        divided=divided,
        coefficient=semantics.load_balance_loss_weight * _context_factor(semantics),
        log=f"per layer: mean over units of {value}, without c_a",
        world_size=world,
        accumulation=steps,
        micro_batch_size=batch,
        notes=tuple(notes),
    )


def _megatron_balance_notes(semantics: LossSemantics, rules: MegatronRules) -> list[str]:
    notes = ["a unit of padding only makes the term NaN (0 / 0)", f"f counts {_assignments(rules)}"]
    sequence = semantics.load_balance_scope is LoadBalanceScope.SEQUENCE
    if sequence and semantics.calculate_per_token_loss and rules.sequence_tokens is SequenceTokens.SEQUENCE:
        notes.append("seq_aux_loss is micro_batch_size times too small in this release")
    if sequence and rules.router_padding is not RouterPadding.NONE:
        notes.append("with a padding mask every sequence is divided by the micro-batch's mean length")
    if rules.load_balance_log_ranks is LogRanks.CONTEXT:
        notes.append("the log is one data rank's")
    return notes


def _assignments(rules: MegatronRules) -> str:
    routed = rules.assignments.value == "routed"
    return "the actual routing (bias and groups included)" if routed else "the plain top-k of the scores"
