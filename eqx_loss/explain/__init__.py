"""What a loss semantics divides by what: `python -m eqx_loss explain`.

A side room of `eqx_loss`: it imports PyYAML, and only to read a run's configuration.
"""

from ._cli import main as main
from ._diff import Difference as Difference
from ._diff import TermDifference as TermDifference
from ._diff import diff_semantics as diff_semantics
from ._diff import measure_difference as measure_difference
from ._explanation import Explanation as Explanation
from ._explanation import TermExplanation as TermExplanation
from ._profile import parse_profile as parse_profile
from ._terms import explain_semantics as explain_semantics
