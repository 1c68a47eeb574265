"""Our arrays by dotted path, and blocks of them put together from checkpoint tensors."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ._rule import Rule

Slices = tuple[slice, ...]


def leaf_paths(tree: Any) -> list[str]:
    """Dotted path of every array, in the order of `jax.tree.leaves`."""
    return [
        jax.tree_util.keystr(path, simple=True, separator=".")
        for path, _ in jax.tree_util.tree_leaves_with_path(tree)
    ]


def array_shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    """Shape of every array by dotted path."""
    return dict(zip(leaf_paths(tree), (tuple(leaf.shape) for leaf in jax.tree.leaves(tree)), strict=True))


class Assembly:
    """Where every block of our arrays comes from.

    Attributes:
        shapes: Shape of every array, by path.
        sources: By path, the rules that fill it, each with the number of its part.
    """

    def __init__(self, table: Sequence[Rule], shapes: Mapping[str, tuple[int, ...]]):
        """Bind rules to arrays.

        Raises:
            ValueError: An array has no rule or a rule names no array: the table and the model disagree.
        """
        self.shapes = dict(shapes)
        self.sources: dict[str, list[tuple[Rule, int]]] = {path: [] for path in shapes}
        for rule in table:
            for part, leaf in enumerate(rule.leaves):
                if leaf not in self.sources:
                    raise ValueError(f"{rule.name} belongs to {leaf}, which this model does not have")
                self.sources[leaf].append((rule, part))
        bare = [path for path, sources in self.sources.items() if not sources]
        if bare:
            raise ValueError(f"no checkpoint tensor is known for {', '.join(bare)}")

    def block_shapes(self, rule: Rule) -> list[tuple[int, ...]]:
        """Shape of each part of a rule, below its index."""
        return [self.shapes[leaf][len(rule.index) :] for leaf in rule.leaves]

    def read_block(
        self, path: str, where: Slices, dtype: np.dtype, read: Callable[[Rule], np.ndarray]
    ) -> np.ndarray:
        """The part `where` of one array; only tensors that touch it are read, one at a time.

        Args:
            path: The array.
            where: One slice per axis, with step 1.
            dtype: Dtype of the result.
            read: Gives the checkpoint tensor of a rule.
        """
        bounds = [part.indices(size) for part, size in zip(where, self.shapes[path], strict=True)]
        block = np.empty([stop - start for start, stop, _ in bounds], dtype=dtype)
        for rule, part in self.sources[path]:
            depth = len(rule.index)
            place = [i - start for i, (start, _, _) in zip(rule.index, bounds)]
            if all(0 <= i < size for i, size in zip(place, block.shape)):
                values = rule.split(read(rule), self.block_shapes(rule))[part]
                block[tuple(place)] = values[tuple(where[depth:])].astype(dtype)
        return block

    def join(self, rule: Rule, arrays: Mapping[str, Any]) -> np.ndarray:
        """The checkpoint tensor of a rule, from our arrays."""
        return rule.join([np.asarray(arrays[leaf][rule.index]) for leaf in rule.leaves])


def make_arrays(
    shapes: Mapping[str, tuple[int, ...]],
    shardings: Mapping[str, jax.sharding.Sharding] | None,
    part: Callable[[str, Slices], np.ndarray],
) -> Iterator[jax.Array]:
    """One array for each path, in order.

    Args:
        shapes: Shape of every array.
        shardings: Where each goes; only the parts that devices of this process hold are asked for. None puts whole
            arrays on the default device.
        part: Gives the numbers of `array[where]`.
    """
    for path, shape in shapes.items():
        whole = tuple(slice(None) for _ in shape)
        if shardings is None:
            yield jax.numpy.asarray(part(path, whole))
        else:
            read = functools.partial(_read_or_all, functools.partial(part, path), whole)
            yield jax.make_array_from_callback(shape, shardings[path], read)


def _read_or_all(read: Callable[[Slices], np.ndarray], whole: Slices, where: Slices | None) -> np.ndarray:
    return read(where or whole)
