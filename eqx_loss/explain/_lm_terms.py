"""The lm cross-entropy and the lm-head z term in words and formulas."""

import dataclasses

from .._release_rules import EmptyGroup, LmGroup, LmMean, MegatronRules, MicroStepRules
from .._semantics import LossSemantics
from ._explanation import NEW_GROUPS, NOTHING, TermExplanation, group_name


def lm_term(semantics: LossSemantics) -> TermExplanation:
    """The lm cross-entropy."""
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
        )
    empty = "counts in G" if semantics.count_empty else "is left out of G"
    return TermExplanation(
        name="lm",
        objective="1/G sum over groups of [sum(m l) / n]",
        divided=f"each {group_name(semantics)}'s sum by its own tokens; the means by their number G",
        coefficient=on,
        log=log,
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


def lm_z_term(semantics: LossSemantics) -> TermExplanation:
    """The lm-head z term, as if it were on."""
    lm = lm_term(semantics)
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
