"""Which layers are alike: the plan by which a model's layers are stacked, run and compiled."""

import dataclasses
from collections.abc import Sequence
from itertools import groupby
from typing import Literal

MixerKind = Literal["linear", "full"]
FfnKind = Literal["dense", "moe"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """Which mixer and which feed-forward a layer has.

    Attributes:
        mixer: "linear" (KDA or lightning) or "full" (MLA or GQA).
        ffn: "dense" or "moe".
    """

    mixer: MixerKind
    ffn: FfnKind

    def __str__(self) -> str:
        """Such as "linear+moe"."""
        return f"{self.mixer}+{self.ffn}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AlikeLayers:
    """All layers of one kind: one set of stacked arrays, one body to compile.

    Attributes:
        kind: What its layers are.
        layers: Their numbers among the main layers, in order.
    """

    kind: LayerPlan
    layers: tuple[int, ...]

    @property
    def stack_shape(self) -> tuple[int, ...]:
        """Leading axes of its arrays: its layers, and none when it has one layer."""
        return (len(self.layers),) if len(self.layers) > 1 else ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackPlan:
    """All main layers by kind, and the order in which they run.

    Attributes:
        alike: One for each kind, in the order of their first layers: as many as there are layer bodies to compile.
        lengths: Layers run group by group, and in a group kind by kind: for each group, how many layers of each kind
            of `alike` follow one another, 0 where it has none.
    """

    alike: tuple[AlikeLayers, ...]
    lengths: tuple[tuple[int, ...], ...]

    @property
    def num_leading(self) -> int:
        """Kinds, the first ones, that no group but the first has."""
        again = [any(group[i] for group in self.lengths[1:]) for i in range(len(self.alike))]
        return next((i for i, is_again in enumerate(again) if is_again), len(again))

    def __str__(self) -> str:
        """Such as "2 linear+dense, 3 linear+moe, full+moe, 6 x (5 linear+moe, full+moe)"."""
        parts: list[str] = []
        for group, times in groupby(self.lengths):
            count = len(list(times))
            runs = ", ".join(
                f"{length} " * (length > 1) + str(own.kind)
                for length, own in zip(group, self.alike, strict=True)
                if length
            )
            parts.append(runs if count == 1 else f"{count} x ({runs})")
        return ", ".join(parts)


def plan_stack(layers: Sequence[LayerPlan]) -> StackPlan:
    """The plan of `layers`: the fewest groups in which kinds follow one another in the order of their first layers."""
    kinds = list(dict.fromkeys(layers))
    groups: list[list[int]] = []
    last = len(kinds)
    for layer in layers:
        kind = kinds.index(layer)
        if kind < last:
            groups.append([0] * len(kinds))
        groups[-1][kind] += 1
        last = kind
    return StackPlan(
        alike=tuple(
            AlikeLayers(kind=kind, layers=tuple(i for i, layer in enumerate(layers) if layer == kind))
            for kind in kinds
        ),
        lengths=tuple(tuple(group) for group in groups),
    )
