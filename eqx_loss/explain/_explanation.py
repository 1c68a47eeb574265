"""What an explanation is made of, and the words that several terms share."""

import dataclasses

from .._release_rules import AuxiliaryShare, MicroStepRules
from .._semantics import LossSemantics

NOTATION = (
    "m: loss mask; m_k: mask of MTP depth k (the target's own); l, l_k: cross-entropy of a token",
    "N: sum of m over the global batch; n, n_k: sums of m, m_k over one group; G: groups of the batch",
    "M: MTP depths; lse: logsumexp of the router logits; T: all counted router positions",
)
NOTHING = "nothing"
NEW_GROUPS = "the groups, so the weights of the tokens (not their sum)"


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
    world_size: str = NOTHING
    accumulation: str = NOTHING
    micro_batch_size: str = NOTHING
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explanation:
    """A semantics: its name and its terms."""

    title: str
    terms: tuple[TermExplanation, ...]


def group_name(semantics: LossSemantics) -> str:
    """What a group of rows is called."""
    return "row" if semantics.micro_batch_size == 1 else f"micro-batch of {semantics.micro_batch_size} rows"


def auxiliary_mean(rules: MicroStepRules, mean: str) -> tuple[str, str, str]:
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


def auxiliary_log(rules: MicroStepRules) -> str:
    """What is logged for an auxiliary mean."""
    if rules.log_divides_auxiliary:
        return "mean over micro-steps, coefficient included"
    return "sum over micro-steps, coefficient included: G times too large"
