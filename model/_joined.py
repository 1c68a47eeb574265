"""Weights that multiply the same input, joined to one matrix where they are gathered anyway.

One product then reads the input once and one makes its whole gradient. Apart, every product adds to a sum that goes
through main memory.
"""

from typing import NamedTuple

import equinox as eqx
from jaxtyping import Array


class Together(NamedTuple):
    """What a module says of weights that may be joined, as its property `together`.

    Attributes:
        names: Fields, alike but for `axis`.
        axis: Where they lie side by side.
    """

    names: tuple[str, ...]
    axis: int


class Part(eqx.Module):
    """One of several joined weights, in the place of its array.

    Attributes:
        joined: All of them; the same array in every part.
        axis: Where they lie side by side.
        sizes: Of all of them along `axis`, in order.
    """

    joined: Array
    axis: int = eqx.field(static=True)
    sizes: tuple[int, ...] = eqx.field(static=True)
