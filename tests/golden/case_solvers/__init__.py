"""Answers to numeric cases through the public API of `eqx_loss`, float64.

A case is recognized by the names of its inputs, not by its file: `solve` runs every solver whose
inputs are there and collects named values; a later, more specific solver wins.
"""

from . import _tokens as _tokens  # isort: skip
from . import _logits as _logits  # isort: skip
from . import _terms as _terms  # isort: skip
from . import _router as _router  # isort: skip
from . import _steps as _steps  # isort: skip
from ._registry import NotExpressible as NotExpressible
from ._registry import number as number
from ._registry import solve as solve
