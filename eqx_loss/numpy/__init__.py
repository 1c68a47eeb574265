"""Token weights without JAX: NumPy arrays in, float64 NumPy array out.

For data loaders and for trainers in other frameworks: `(w * cross_entropy).sum().backward()`.
`_weights.py` needs NumPy alone and may be copied into another project.
"""

from .._scale import Reductions as Reductions
from .._scale import scale_for as scale_for
from ._weights import GRANULARITIES as GRANULARITIES
from ._weights import token_weights as token_weights
