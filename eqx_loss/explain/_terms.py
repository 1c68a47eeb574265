"""The terms of a `LossSemantics` in words and formulas."""

from .._release_rules import MegatronRules, MicroStepRules
from .._semantics import LossSemantics
from ._explanation import Explanation
from ._lm_terms import lm_term, lm_z_term
from ._mtp_term import mtp_term
from ._router_terms import load_balance_term, router_z_term


def explain_semantics(semantics: LossSemantics, *, num_mtp_layers: int = 1) -> Explanation:
    """Explains every term; terms with coefficient 0 are explained as if they were on.

    Args:
        semantics: What to explain.
        num_mtp_layers: MTP depths of the model, at least 0; 0 leaves MTP out.
    """
    terms = [lm_term(semantics), lm_z_term(semantics)]
    if num_mtp_layers > 0:
        terms.append(mtp_term(semantics, num_mtp_layers))
    terms += [router_z_term(semantics), load_balance_term(semantics)]
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
