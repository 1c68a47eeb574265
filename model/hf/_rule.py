"""How one checkpoint tensor is cut into our arrays, and put together again: permutations only, so bit-exact."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One checkpoint tensor, seen as `view`, cut along `axis` into parts, each with its axes put in `order`.

    Attributes:
        name: Name of the tensor in the checkpoint.
        shape: Its shape there.
        view: The same elements in row-major order under another shape.
        axis: Axis of the view that is cut.
        sizes: Sizes of the parts along `axis`; they sum to its length.
        order: Permutation of the view's axes that gives our order.
        leaves: Path of our array for each part.
        index: Place of the parts in the leading (stacked) axes of those arrays; () when there are none.
    """

    name: str
    shape: tuple[int, ...]
    view: tuple[int, ...]
    order: tuple[int, ...]
    leaves: tuple[str, ...]
    axis: int = 0
    sizes: tuple[int, ...] = ()
    index: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert math.prod(self.shape) == math.prod(self.view), self
        assert sorted(self.order) == list(range(len(self.view))), self
        assert len(self.leaves) == max(len(self.sizes), 1), self
        assert not self.sizes or sum(self.sizes) == self.view[self.axis], self

    def split(self, tensor: np.ndarray, shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
        """Our arrays (one block each, of the given shapes) from the checkpoint tensor."""
        parts = [tensor.reshape(self.view)]
        if self.sizes:
            parts = np.split(parts[0], np.cumsum(self.sizes)[:-1], axis=self.axis)
        return [
            np.ascontiguousarray(part.transpose(self.order)).reshape(shape)
            for part, shape in zip(parts, shapes, strict=True)
        ]

    def join(self, blocks: Sequence[np.ndarray]) -> np.ndarray:
        """The checkpoint tensor from our blocks; the inverse of `split`."""
        back = tuple(int(i) for i in np.argsort(self.order))
        parts = []
        for block, size in zip(blocks, self.sizes or (self.view[self.axis],), strict=True):
            part = tuple(size if i == self.axis else n for i, n in enumerate(self.view))
            parts.append(block.reshape([part[i] for i in self.order]).transpose(back))
        return np.ascontiguousarray(np.concatenate(parts, axis=self.axis)).reshape(self.shape)


def whole(name: str, shape: tuple[int, ...], leaf: str, *, index: tuple[int, ...] = ()) -> Rule:
    """The tensor as it is."""
    return Rule(
        name=name, shape=shape, view=shape, order=tuple(range(len(shape))), leaves=(leaf,), index=index
    )


def linear(
    name: str,
    rows: tuple[int, ...],
    columns: tuple[int, ...],
    leaf: str,
    *,
    index: tuple[int, ...] = (),
) -> Rule:
    """A torch linear weight [out, in] as our [in, out], with the output or input axis factored.

    Args:
        name: Checkpoint name.
        rows: Factors of the input axis.
        columns: Factors of the output axis.
        leaf: Our array, of shape `rows + columns`.
        index: Place in stacked axes.
    """
    view = (*columns, *rows)
    order = (*range(len(columns), len(view)), *range(len(columns)))
    shape = (math.prod(columns), math.prod(rows))
    return Rule(name=name, shape=shape, view=view, order=order, leaves=(leaf,), index=index)


def split_linear(
    name: str,
    rows: int,
    heads: int,
    sizes: tuple[int, ...],
    leaves: tuple[str, ...],
    *,
    index: tuple[int, ...] = (),
) -> Rule:
    """A linear weight whose output is, per head, several parts one after another: our [rows, heads, size] arrays."""
    width = sum(sizes)
    return Rule(
        name=name,
        shape=(heads * width, rows),
        view=(heads, width, rows),
        axis=1,
        sizes=sizes,
        order=(2, 0, 1),
        leaves=leaves,
        index=index,
    )
