"""The optimizer: AdamW, or Muon with AdamW for what is no matrix; clipping, decay rules, skipped steps.

Every parameter has a label from its declared metadata, never from its rank: `muon`, `adamw` or `frozen`
(arrays that the optimizer must not touch, such as the router bias).
"""

import fnmatch
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jaxtyping import Array, Bool, Float, PyTree

from model import ParamSpec

from ._muon import MatrixLayout, MuonConfig, MuonState, scale_by_muon
from ._schedule import ScheduleConfig

Label = Literal["muon", "adamw", "frozen"]


@dataclass(frozen=True)
class DecayRule:
    """Weight decay of the parameters whose dotted path matches a glob, as a multiple of `weight_decay`."""

    pattern: str
    multiplier: float


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """What the optimizer does with a gradient.

    Attributes:
        schedule: Learning rate of both algorithms.
        name: `adamw` for all, or `muon` for declared matrices and AdamW for the rest.
        b1: AdamW's decay of the mean gradient, in [0, 1).
        b2: AdamW's decay of the mean square, in [0, 1).
        eps: Added to the root of the mean square.
        weight_decay: Decoupled decay per unit of learning rate.
        decay_norms: Norm scales decay too (Megatron's `--weight-decay-norm-params`); biases never do by
            themselves.
        decay_rules: The first rule whose pattern matches a path decides, before what the roles say.
        max_grad_norm: Gradients are scaled down to this global norm; None never clips.
        muon: Constants of Muon.
        shard_state_over_data: Optimizer state is cut over the replicas too (ZeRO-1).
        router_bias_update_rate: Step of the router bias; 0 keeps it.
        router_bias_zero_mean: The mean over experts of the router bias is taken off after each step (Ling).
        qk_clip_threshold: Largest attention logit that QK-Clip leaves alone; None is off.
    """

    schedule: ScheduleConfig
    name: Literal["adamw", "muon"] = "adamw"
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    decay_norms: bool = False
    decay_rules: tuple[DecayRule, ...] = ()
    max_grad_norm: float | None = 1.0
    muon: MuonConfig = field(default_factory=MuonConfig)
    shard_state_over_data: bool = False
    router_bias_update_rate: float = 1e-3
    router_bias_zero_mean: bool = False
    qk_clip_threshold: float | None = None

    def __post_init__(self) -> None:
        for name in ("b1", "b2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)}")
        if self.eps <= 0:
            raise ValueError(f"eps must be positive, got {self.eps}")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay must be finite and not negative, got {self.weight_decay}")
        if self.router_bias_update_rate < 0:
            raise ValueError(
                f"router_bias_update_rate must not be negative, got {self.router_bias_update_rate};"
                " use 0 to keep the bias"
            )
        if self.qk_clip_threshold is not None and self.qk_clip_threshold <= 0:
            raise ValueError(
                f"qk_clip_threshold must be positive, got {self.qk_clip_threshold}; use null to turn it off"
            )
        if self.max_grad_norm is not None and self.max_grad_norm <= 0:
            raise ValueError(
                f"max_grad_norm must be positive, got {self.max_grad_norm}; use null to never clip"
            )


class OptimizerState(NamedTuple):
    """Moments by dotted path of the parameter; no path is in both.

    Attributes:
        adamw: Step count, mean and mean square of optax's Adam.
        muon: Momentum of the matrices.
    """

    adamw: optax.ScaleByAdamState
    muon: MuonState


class OptimizerStep(NamedTuple):
    """The result of one update.

    Attributes:
        params: Parameters after the step; unchanged when the gradient is not finite.
        state: Optimizer state after the step; unchanged likewise.
        grad_norm: Global norm after clipping.
        raw_grad_norm: Global norm before clipping, frozen parameters left out.
        is_skipped: True when the raw norm is NaN or infinite.
    """

    params: PyTree
    state: OptimizerState
    grad_norm: Float[Array, ""]
    raw_grad_norm: Float[Array, ""]
    is_skipped: Bool[Array, ""]


class Optimizer:
    """AdamW or Muon bound to the rules of one parameter tree; holds no arrays."""

    def __init__(self, config: OptimizerConfig, specs: Mapping[str, ParamSpec]) -> None:
        """Binds `config` to `specs`, the declared facts of each dotted path of the parameter tree."""
        self.config = config
        self.specs = dict(specs)

    def check(self, params: PyTree) -> None:
        """Refuses a parameter tree that is not the one of the metadata.

        Raises:
            ValueError: A parameter declares nothing, or a declaration has no parameter.
        """
        paths = parameter_paths(params)
        missing = sorted(set(paths) - set(self.specs))
        unused = sorted(set(self.specs) - set(paths))
        if missing or unused:
            raise ValueError(
                f"parameters and declared metadata must agree: without metadata {missing},"
                f" without parameter {unused}"
            )

    def label(self, path: str) -> Label:
        """Which rule trains the parameter at `path`."""
        role = self.specs[path].role
        if role == "router_bias":
            return "frozen"
        return "muon" if self.config.name == "muon" and role == "matrix" else "adamw"

    def decay(self, path: str) -> float:
        """Weight decay of the parameter at `path`, per unit of learning rate."""
        role = self.specs[path].role
        if role == "router_bias":
            return 0.0
        for rule in self.config.decay_rules:
            if fnmatch.fnmatchcase(path, rule.pattern):
                return self.config.weight_decay * rule.multiplier
        is_whole = role != "bias" and (role != "norm" or self.config.decay_norms)
        return self.config.weight_decay if is_whole else 0.0

    def init(self, params: PyTree) -> OptimizerState:
        """Optimizer state: float32 zeros."""
        self.check(params)
        adamw, muon = self._split(params)
        # optax types every state as one union; these two are the states of their transformations.
        adamw_state: Any = self._adamw.init(adamw)
        muon_state: Any = self._muon(muon, None).init(muon)
        return OptimizerState(adamw=adamw_state, muon=muon_state)

    def step(
        self,
        grads: PyTree,
        state: OptimizerState,
        params: PyTree,
        rate: Float[Array, ""],
        shardings: PyTree | None = None,
    ) -> OptimizerStep:
        """One update: clip, direction, decoupled decay; nothing changes when the gradient is not finite.

        Args:
            grads: Gradient of the whole global batch.
            state: State of `init` or of the previous step.
            params: Parameters, float32.
            rate: Learning rate.
            shardings: `NamedSharding` of each gradient; needed by Muon on several devices.
        """
        paths = parameter_paths(params)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        raw_norm = global_norm(
            [g for g, p in zip(jax.tree.leaves(grads), paths) if self.label(p) != "frozen"]
        )
        is_finite = jnp.isfinite(raw_norm)
        scale = clip_scale(raw_norm, self.config.max_grad_norm)
        # A norm that is not finite makes NaN directions; the selects below drop all of them.
        directions, advanced = self._directions(
            jax.tree.map(lambda g: g * scale, grads), state, params, shardings
        )
        moved = [
            p if d is None else p - rate * (d + self.decay(path) * p)
            for path, p, d in zip(paths, jax.tree.leaves(params), directions, strict=True)
        ]

        def keep(new: Array, old: Array) -> Array:
            return jnp.where(is_finite, new, old)

        return OptimizerStep(
            params=jax.tree.map(keep, jax.tree.unflatten(jax.tree.structure(params), moved), params),
            state=jax.tree.map(keep, advanced, state),
            grad_norm=raw_norm * scale,
            raw_grad_norm=raw_norm,
            is_skipped=~is_finite,
        )

    def table(self, params: PyTree) -> list[tuple[str, str, float, tuple[int, ...]]]:
        """(path, label, weight decay, shape) of each parameter: what a run prints before its first step."""
        self.check(params)
        leaves = jax.tree.leaves(params)
        return [
            (path, self.label(path), self.decay(path), tuple(leaf.shape))
            for path, leaf in zip(parameter_paths(params), leaves)
        ]

    @property
    def _adamw(self) -> optax.GradientTransformation:
        return optax.scale_by_adam(self.config.b1, self.config.b2, self.config.eps, mu_dtype=jnp.float32)

    def _muon(
        self, arrays: dict[str, Array], shardings: dict[str, NamedSharding] | None
    ) -> optax.GradientTransformation:
        layouts = {path: matrix_layout(self.specs[path]) for path in arrays}
        return scale_by_muon(self.config.muon, layouts, shardings)

    def _split(self, tree: PyTree) -> tuple[dict[str, Any], dict[str, Any]]:
        """Leaves by path, those of AdamW and those of Muon."""
        leaves = dict(zip(parameter_paths(tree), jax.tree.leaves(tree), strict=True))
        adamw = {path: leaf for path, leaf in leaves.items() if self.label(path) == "adamw"}
        muon = {path: leaf for path, leaf in leaves.items() if self.label(path) == "muon"}
        return adamw, muon

    def _directions(
        self, grads: PyTree, state: OptimizerState, params: PyTree, shardings: PyTree | None
    ) -> tuple[list[Array | None], OptimizerState]:
        """Direction of every parameter in order, None for a frozen one, and the next state."""
        adamw, muon = self._split(grads)
        places = None if shardings is None else self._split(shardings)[1]
        adamw_state: Any
        muon_state: Any
        adamw_found: Any
        muon_found: Any
        adamw_found, adamw_state = self._adamw.update(adamw, state.adamw)
        muon_found, muon_state = self._muon(muon, places).update(muon, state.muon)
        found = {**adamw_found, **muon_found}
        ordered = [found.get(path) for path in parameter_paths(params)]
        return ordered, OptimizerState(adamw=adamw_state, muon=muon_state)


def parameter_paths(params: PyTree) -> list[str]:
    """Dotted path of each leaf, in the order of `jax.tree.leaves`."""
    return [
        jax.tree_util.keystr(path, simple=True, separator=".")
        for path, _ in jax.tree_util.tree_leaves_with_path(params)
    ]


def matrix_layout(spec: ParamSpec) -> MatrixLayout:
    """The matrices that `spec` declares, by axis index.

    Raises:
        ValueError: The parameter is no matrix.
    """
    if spec.role != "matrix":
        raise ValueError(f"a parameter of role {spec.role!r} has no matrices; only 'matrix' has")
    names = spec.axes.split()
    fan_in, fan_out = spec.rows.split(), spec.columns.split()
    return MatrixLayout(
        batch=tuple(i for i, name in enumerate(names) if name not in (*fan_in, *fan_out)),
        fan_in=tuple(names.index(name) for name in fan_in),
        fan_out=tuple(names.index(name) for name in fan_out),
    )


def global_norm(grads: list[Float[Array, "..."]]) -> Float[Array, ""]:
    """Root of the sum of squares of all entries, float32; 0 for no gradient."""
    # float32 first: a norm of bfloat16 gradients would be summed in bfloat16.
    squares = [jnp.sum(jnp.square(g.astype(jnp.float32))) for g in grads]
    return jnp.sqrt(sum(squares, start=jnp.zeros((), jnp.float32)))


def clip_scale(norm: Float[Array, ""], max_norm: float | None) -> Float[Array, ""]:
    """`min(1, max_norm / norm)`; 1 for a zero norm or without a limit."""
    if max_norm is None:
        return jnp.ones((), jnp.float32)
    above = norm > max_norm
    return jnp.where(above, max_norm / jnp.where(above, norm, 1.0), 1.0)
