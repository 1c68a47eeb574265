"""One golden case through our public functions, compared with what Megatron gave."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from eqx_loss import (
    BatchLayout,
    HeadLoss,
    LoadBalanceScope,
    LossSemantics,
    LossWeights,
    MegatronRules,
    RouterTerms,
    cross_entropy,
    head_loss,
    loss_output,
    loss_weights,
    megatron_logs,
    row_pieces,
    shift_targets,
)

from ._case import Case
from ._toy import ToyOutput, router_scores, toy_model

RTOL = 1e-12  # float64, at most a few hundred terms a sum; Megatron's own runs differ by 1e-14
SCOPES = {
    "aux_loss": LoadBalanceScope.MICRO_BATCH,
    "seq_aux_loss": LoadBalanceScope.SEQUENCE,
    "global_aux_loss": LoadBalanceScope.GLOBAL_BATCH,
}
LOG_NAMES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
FIELDS = {"total": "total", "lm": "lm", "mtp": "mtp", "z": "router_z", "aux": "load_balance"}


class Verdict(NamedTuple):
    """Largest relative error of each kind, what it was, and our default beside Megatron's."""

    errors: dict[str, float]
    default: dict[str, tuple[float, float]]

    @property
    def worst(self) -> tuple[str, float]:
        name = max(self.errors, key=lambda key: self.errors[key])
        return name, self.errors[name]

    @property
    def passed(self) -> bool:
        return self.worst[1] <= RTOL


@dataclasses.dataclass(frozen=True)
class Setting:
    """A semantics and the extra facts that a batch needs under it."""

    semantics: LossSemantics
    aux: tuple[tuple[str, float], ...]
    layout: BatchLayout
    segment_ids: Array | None
    router_mask: Array | None

    def parts(self, has_routers: bool) -> list[LossSemantics]:
        """One semantics for everything and the first load balance, then one for each further."""
        if not has_routers:
            return [dataclasses.replace(self.semantics, moe_z_loss_weight=0.0)]
        first = [
            dataclasses.replace(self.semantics, load_balance_scope=SCOPES[n], load_balance_loss_weight=c)
            for n, c in self.aux
        ]
        return first or [self.semantics]


def check_case(case: Case, *, with_default: bool = True) -> Verdict:
    """Runs the case under its release's profile, and under our default for comparison.

    Raises:
        ValueError: The file needs something that the profile says its release has not.
    """
    with jax.enable_x64(True):
        run = _run(case, megatron_setting(case))
        errors: dict[str, float] = {}
        _compare_model(case, run, errors)
        values = _compare_gradients(case, run, errors)
        _compare_logs(case, run, errors)
        default: dict[str, tuple[float, float]] = {}
        if with_default:
            own = _run(case, default_setting(case))
            ours = _channels(own, own.output)
            default = {name: (float(ours[name]), value) for name, value in values.items()}
    return Verdict(errors, default)


def megatron_setting(case: Case) -> Setting:
    """The profile of the case's release."""
    config = case.config
    packed = case.segment_ids is not None
    semantics = LossSemantics.megatron(
        case.release,
        calculate_per_token_loss=bool(config["per_token"]),
        micro_batch_size=int(config["micro_batch_size"]),
        context_parallel_size=int(config["cp"]),
        packed_sequences=packed,
    )
    return _setting(case, semantics)


def default_setting(case: Case) -> Setting:
    """Our own rules with the case's flag and coefficients."""
    return _setting(
        case,
        LossSemantics(
            calculate_per_token_loss=bool(case.config["per_token"]),
            micro_batch_size=int(case.config["micro_batch_size"]),
        ),
    )


def _setting(case: Case, semantics: LossSemantics) -> Setting:
    order = case.batch["order"]
    rows = tuple(int(row) for row in order.reshape(-1))
    padding = case.batch.get("padding_mask")
    segments = case.segment_ids
    return Setting(
        semantics=dataclasses.replace(
            semantics,
            mtp_loss_scaling_factor=float(case.config["mtp_scale"]),
            moe_z_loss_weight=float(case.config["z_coeff"] or 0.0),
        ),
        aux=tuple((str(name), float(value)) for name, value in case.config["aux"]),
        layout=BatchLayout(
            num_micro_batches=order.shape[0],
            data_parallel_size=order.shape[1],
            row_order=None if rows == tuple(range(len(rows))) else rows,
        ),
        segment_ids=None if segments is None else jnp.asarray(segments),
        router_mask=None if padding is None else jnp.asarray(~padding.astype(bool)),
    )


def case_params(case: Case) -> dict[str, Array]:
    return {name: jnp.asarray(value) for name, value in case.params.items()}


@dataclasses.dataclass(frozen=True)
class _Run:
    """The model's output on the batch, its pullback, and all that is made from masks alone."""

    setting: Setting
    output: ToyOutput
    pullback: Callable[[ToyOutput], tuple[dict[str, Array]]]
    mask: Array
    scale: Array
    targets: list[Array]
    num_active: int
    weights: list[tuple[LossSemantics, LossWeights]]


def _run(case: Case, setting: Setting) -> _Run:
    scale = jnp.asarray(case.batch["loss_mask"])
    mask = scale != 0
    num_active = int(case.config.get("topk") or 1)

    def shifted(values: np.ndarray) -> list[Array]:
        return [
            shift_targets(
                jnp.asarray(values),
                mask,
                depth=depth,
                segment_ids=setting.segment_ids,
                roll_across_documents=setting.semantics.mtp_roll_across_documents,
            )[0]
            for depth in range(case.num_mtp_layers + 1)
        ]

    tokens = shifted(case.batch["tokens"])
    output, pullback = jax.vjp(
        lambda params: toy_model(params, tokens, int(case.config["num_layers"]), num_active),
        {name: jnp.asarray(value) for name, value in case.params.items()},
    )
    weights = [
        loss_weights(
            mask,
            semantics,
            num_mtp_layers=case.num_mtp_layers,
            segment_ids=setting.segment_ids,
            token_scale=scale,
            router_mask=setting.router_mask,
            layout=setting.layout,
        )
        for semantics in setting.parts(bool(output.router_logits))
    ]
    return _Run(
        setting=setting,
        output=output,
        pullback=pullback,
        mask=mask,
        scale=scale,
        targets=shifted(case.batch["labels"]),
        num_active=num_active,
        weights=list(zip(setting.parts(bool(output.router_logits)), weights)),
    )


def _heads(run: _Run, output: ToyOutput, weights: LossWeights) -> list[HeadLoss]:
    masks = [weights.lm_mask, *weights.mtp_mask]
    objectives = [weights.lm_objective, *weights.mtp_objective]
    return [
        head_loss(cross_entropy(logits, targets, mask), weight)
        for logits, targets, mask, weight in zip(output.logits, run.targets, masks, objectives)
    ]


def _router_terms(run: _Run, output: ToyOutput, weights: LossWeights) -> RouterTerms | None:
    if not output.router_logits:
        return None
    own = [router.mask for router in weights.mtp_routers]
    masks = [weights.router_mask] * (len(output.router_logits) - len(own)) + own
    scores = router_scores(output.router_logits, masks, run.num_active)
    rules = run.setting.semantics.rules
    size = rules.context_parallel_size if isinstance(rules, MegatronRules) else 1
    packed = isinstance(rules, MegatronRules) and rules.packed_sequences
    documents = run.setting.segment_ids if packed else None
    return RouterTerms(
        logsumexp=jnp.stack([jax.nn.logsumexp(logits, axis=-1) for logits in output.router_logits]),
        score_sums=row_pieces(scores.scores, size, documents),
        counts=row_pieces(scores.assigned, size, documents),
    )


def _channels(run: _Run, output: ToyOutput) -> dict[str, Array]:
    """Every channel's objective; several load balances add up."""
    channels: dict[str, Array] = {}
    for index, (semantics, weights) in enumerate(run.weights):
        heads = _heads(run, output, weights)
        router = _router_terms(run, output, weights)
        objective = loss_output(
            heads[0], tuple(heads[1:]), router, weights, semantics, layout=run.setting.layout
        ).objective
        if index == 0:
            channels = {name: getattr(objective, field) for name, field in FIELDS.items()}
        else:
            channels["aux"] = channels["aux"] + objective.load_balance
            channels["total"] = channels["total"] + objective.load_balance
    return channels


def _compare_model(case: Case, run: _Run, errors: dict[str, float]) -> None:
    """Cross-entropies and shifted masks, before any normalization."""
    everywhere = jnp.ones(run.mask.shape, bool)
    for depth, (logits, targets) in enumerate(zip(run.output.logits, run.targets)):
        xent = cross_entropy(logits, targets, everywhere).xent
        errors[f"ce{depth}"] = relative_error(np.asarray(xent), case.batch[f"ce{depth}"])
        if depth > 0:
            # One more than the position that the slot comes from; 0 in a freed slot.
            source = shift_targets(
                jnp.broadcast_to(jnp.arange(1, run.mask.shape[1] + 1), run.mask.shape),
                run.mask,
                depth=depth,
                segment_ids=run.setting.segment_ids,
                roll_across_documents=run.setting.semantics.mtp_roll_across_documents,
            )[0]
            taken = jnp.take_along_axis(run.scale, jnp.maximum(source - 1, 0), axis=1)
            rolled = jnp.where(source > 0, taken, 0.0)
            errors[f"mask{depth}"] = relative_error(np.asarray(rolled), case.batch[f"mask{depth}"])


def _compare_gradients(case: Case, run: _Run, errors: dict[str, float]) -> dict[str, float]:
    """Gradient of every channel by itself, so that a NaN stays in its own."""
    values: dict[str, float] = {}
    for index, channel in enumerate(case.channels):
        value, cotangent = jax.value_and_grad(lambda output, name=channel: _channels(run, output)[name])(
            run.output
        )
        (gradient,) = run.pullback(cotangent)
        values[channel] = float(value)
        largest = max(_finite_max(grad[index]) for grad in case.grads.values())
        for name, expected in case.grads.items():
            errors[f"{channel} gradient of {name}"] = relative_error(
                np.asarray(gradient[name]), expected[index], floor=1e-6 * largest
            )
    objectives = {"lm": values["total"], **values} if case.channels == ("total",) else values
    for channel, expected_value in case.objective.items():
        errors[f"{channel} objective"] = relative_error(
            np.asarray(objectives[channel]), np.asarray(expected_value)
        )
    return values


def _compare_logs(case: Case, run: _Run, errors: dict[str, float]) -> None:
    found: dict[str, np.ndarray] = {}
    names = [name for name, _ in run.setting.aux] or [""]
    for name, (semantics, weights) in zip(names, run.weights):
        heads = _heads(run, run.output, weights)
        logs = megatron_logs(
            heads[0],
            tuple(heads[1:]),
            _router_terms(run, run.output, weights),
            run.mask,
            semantics,
            layout=run.setting.layout,
            segment_ids=run.setting.segment_ids,
            token_scale=run.scale,
            router_mask=run.setting.router_mask,
        )
        found |= {"lm loss": np.asarray(logs.lm), "z_loss": np.asarray(logs.router_z)}
        found |= {f"mtp_{k + 1} loss": np.asarray(value) for k, value in enumerate(logs.mtp)}
        if name:
            own_name = LOG_NAMES[name] in case.logs  # 0.12 and 0.13 have one name for all
            found[LOG_NAMES[name] if own_name else "load_balancing_loss"] = np.asarray(logs.load_balance)
    for name, expected in case.logs.items():
        errors[f"log {name}"] = relative_error(found[name].reshape(-1), np.asarray(expected))


def _finite_max(values: np.ndarray) -> float:
    finite = np.abs(values[np.isfinite(values)])
    return float(finite.max()) if finite.size else 0.0


def relative_error(found: np.ndarray, expected: np.ndarray, *, floor: float = 0.0) -> float:
    """Largest difference over the largest expected value; infinite when NaNs or Infs differ."""
    if found.shape != expected.shape:
        return np.inf
    finite = np.isfinite(expected)
    same = np.array_equal(np.isfinite(found), finite) and np.array_equal(
        found[~finite], expected[~finite], equal_nan=True
    )
    if not same:
        return np.inf
    difference = _finite_max(np.where(finite, found, 0.0) - np.where(finite, expected, 0.0))
    scale = max(_finite_max(expected), floor)
    if difference == 0.0:
        return 0.0
    return difference / scale if scale > 0 else np.inf
