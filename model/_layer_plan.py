"""Which layers are alike: the plan by which a model's layers are stacked, scanned and compiled."""

import dataclasses
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Literal, TypeVar

MixerKind = Literal["linear", "full"]
FfnKind = Literal["dense", "moe"]
V = TypeVar("V")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """Which mixer and which feed-forward a layer has.

    Attributes:
        mixer: "linear" (KDA or lightning) or "full" (MLA or GQA).
        ffn: "dense" or "moe".
    """

    mixer: MixerKind
    ffn: FfnKind


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerRun:
    """Consecutive alike layers, once or once in every group: one set of stacked arrays, one body to compile.

    Attributes:
        kind: What its layers are.
        length: How many follow one another.
        layers: All its main layers in order, those of the first group first.
    """

    kind: LayerPlan
    length: int
    layers: tuple[int, ...]

    @property
    def num_groups(self) -> int:
        """Groups that repeat the run; 1 when it is in no scanned group."""
        return len(self.layers) // self.length

    @property
    def stack_shape(self) -> tuple[int, ...]:
        """Leading axes of its arrays: its groups, then its layers; an axis of size 1 is left out."""
        return tuple(size for size in (self.num_groups, self.length) if size > 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackPlan:
    """All main layers in runs: some once, then groups of runs again and again, then some once.

    Attributes:
        prefix: Runs before the groups.
        groups: Runs of a group, which is scanned over; none when nothing repeats.
        suffix: Runs after the groups.
    """

    prefix: tuple[LayerRun, ...]
    groups: tuple[LayerRun, ...]
    suffix: tuple[LayerRun, ...]

    @property
    def runs(self) -> tuple[LayerRun, ...]:
        """All runs in order: as many as there are layer bodies to compile."""
        return (*self.prefix, *self.groups, *self.suffix)

    def split(self, values: Sequence[V]) -> tuple[tuple[V, ...], tuple[V, ...], tuple[V, ...]]:
        """Values of all `runs` as those of the prefix, the groups and the suffix."""
        start, end = len(self.prefix), len(self.prefix) + len(self.groups)
        return tuple(values[:start]), tuple(values[start:end]), tuple(values[end:])

    def __str__(self) -> str:
        """Such as "2 linear+dense, 3 linear+moe, full+moe, 6 x (5 linear+moe, full+moe)"."""
        before, inside, after = (
            ", ".join(
                f"{run.length} " * (run.length > 1) + f"{run.kind.mixer}+{run.kind.ffn}" for run in runs
            )
            for runs in (self.prefix, self.groups, self.suffix)
        )
        repeated = f"{self.groups[0].num_groups} x ({inside})" if inside else ""
        return ", ".join(part for part in (before, repeated, after) if part)


def plan_stack(layers: Sequence[LayerPlan]) -> StackPlan:
    """The plan of `layers` with the fewest runs.

    Every stretch of layers that repeats itself at once is tried as the groups. Among plans of equally many runs, fewest
    layers after the groups win, then fewest before them, then the shortest group.
    """
    num_layers = len(layers)
    changes = [0, *accumulate(int(a != b) for a, b in pairwise(layers))]

    def num_runs(first: int, end: int) -> int:
        return 0 if first == end else 1 + changes[end - 1] - changes[first]

    def cost(start: int, size: int, num_groups: int) -> tuple[int, int, int, int]:
        end = start + size * num_groups
        runs = num_runs(0, start) + num_runs(start, start + size) + num_runs(end, num_layers)
        return runs, num_layers - end, start, size

    found = [(num_layers, 0, 0)]
    for size in range(1, num_layers // 2 + 1):
        alike = 0  # layers from `start` on that are as the ones `size` later
        for start in range(num_layers - size - 1, -1, -1):
            alike = alike + 1 if layers[start] == layers[start + size] else 0
            if alike >= size:
                found.append((start, size, alike // size + 1))
    start, size, num_groups = min(found, key=lambda place: cost(*place))
    end = start + size * num_groups
    return StackPlan(
        prefix=_runs(layers, range(start), 1),
        groups=_runs(layers, range(start, start + size), num_groups),
        suffix=_runs(layers, range(end, num_layers), 1),
    )


def _runs(layers: Sequence[LayerPlan], places: range, num_groups: int) -> tuple[LayerRun, ...]:
    """Runs of the layers at `places`, which come `num_groups` times one after the other."""
    firsts = [i for i in places if i == places.start or layers[i] != layers[i - 1]]
    return tuple(
        LayerRun(
            kind=layers[first],
            length=end - first,
            layers=tuple(g * len(places) + i for g in range(num_groups) for i in range(first, end)),
        )
        for first, end in zip(firsts, (*firsts[1:], places.stop))
    )
