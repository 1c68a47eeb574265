"""Router z and load balance in words and formulas."""

import dataclasses

from .._release_rules import (
    ContextFactor,
    LogRanks,
    MegatronRules,
    MicroStepRules,
    RouterPadding,
    SequenceTokens,
)
from .._router import LoadBalanceScope
from .._semantics import LossSemantics
from ._explanation import NEW_GROUPS, NOTHING, TermExplanation, auxiliary_log, auxiliary_mean


def router_z_term(semantics: LossSemantics) -> TermExplanation:
    """The router z-loss, as if it were on."""
    factor = semantics.moe_z_loss_weight
    log = "per layer: mean over groups of the group's mean of lse^2, without c_z"
    rules = semantics.rules
    notes: list[str] = ["every position counts, padding included, unless a padding mask is given"]
    batch = NOTHING
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
        mean = "[sum over T of lse^2 / max(N, 1)]"
        divided = "the sum over router positions by the lm token count: T/N times a mean"
        notes.append("without a scored token in the step the sum is not divided at all")
    else:
        mean = "1/G sum over groups of [mean of lse^2]"
        divided = "each group's sum by its positions; equal to the global mean unless padding is masked"
        batch = NEW_GROUPS if semantics.mask_padding_in_router_losses else NOTHING
    return TermExplanation(
        name="router_z",
        objective=f"c_z sum over layers of {mean}" + _context_scale(semantics),
        divided=divided,
        coefficient=factor * _context_factor(semantics),
        log=log,
        world_size=world,
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


def load_balance_term(semantics: LossSemantics) -> TermExplanation:
    """The load-balance loss, as if it were on."""
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
        formula, steps, note = auxiliary_mean(rules, f"mean over units of {value}")
        return TermExplanation(
            name="load_balance",
            objective=f"c_a {layers} over layers of {formula}",
            divided="each unit's scores by its positions, units by their number",
            coefficient=semantics.load_balance_loss_weight,
            log=auxiliary_log(rules),
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
