"""Judges a checkpoint folder: our model on the case's inputs, value by value and gradient by gradient."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from model import ModelOutput, Transformer
from model.hf import load_hf, to_checkpoint_tensors

from ._folder import ModelCase
from ._report import FAST_COMPILATION, Judge, Line, Precision, rounding_noise, summary_error

IGNORED = -100


def judge_model(case: ModelCase, precision: Precision) -> list[Line]:
    """Every expected tensor, every stored gradient, and norm and probe of every parameter's gradient."""
    judge = Judge(case.name, precision)
    try:
        _, model = load_hf(case.path, dtype=precision, param_dtype=precision)
        run = _Run(case, model)
    except Exception as error:  # an unreadable case must not hide the others
        judge.failure("load", f"{type(error).__name__}: {str(error).splitlines()[0][:160]}")
        return judge.lines
    for part in (_values, _routing, _mtp, _gradients):
        try:
            part(judge, case, run)
        except Exception as error:
            judge.failure(
                part.__name__.strip("_"), f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
            )
    return judge.lines


class _Run:
    """Our numbers for one case. Positions are 0..S-1 in every row, padding included, as in the reference."""

    def __init__(self, case: ModelCase, model: Transformer):
        self.model = model
        self.tokens = jnp.asarray(case.inputs["input_ids"])
        self.mask = case.inputs["attention_mask"] != 0
        self.labels = case.inputs["labels"]
        self.scored = _scored(case, self.labels)
        self.mtp_scored = [_mtp_scored(case, self, k) for k in range(model.config.num_mtp_layers)]
        self.output, self.gradients = self._compute()
        self.logits = np.asarray(_logits(self.output.hidden, model))

    def _compute(self) -> tuple[ModelOutput, dict[str, Transformer]]:
        """The forward pass, and the gradients of the main loss and of the sum of the MTP losses: one program."""
        names = ["main", "mtp"] if self.mtp_scored else ["main"]

        @functools.partial(eqx.filter_jit, compiler_options=FAST_COMPILATION)
        def run(model: Transformer):
            arrays, static = eqx.partition(model, eqx.is_array)
            losses, pull, output = jax.vjp(
                lambda a: self._losses(eqx.combine(a, static)), arrays, has_aux=True
            )
            # a loop, not vmap: the backward pass is compiled once, and ragged_dot has no batching rule
            (gradients,) = jax.lax.map(pull, jnp.eye(len(names), dtype=losses.dtype))
            return output, [jax.tree.map(lambda g, i=i: g[i], gradients) for i in range(len(names))]

        output, gradients = run(self.model)
        return output, dict(zip(names, gradients, strict=True))

    def _losses(self, model: Transformer) -> tuple[Float[Array, " n"], ModelOutput]:
        output = _forward(model, self.tokens, jnp.asarray(self.mask))
        length = self.labels.shape[1]
        losses = [_loss(_logits(output.hidden, model), _targets(self.labels, 1, length), self.scored)]
        if self.mtp_scored:
            losses.append(sum(self._mtp_loss(model, output, k) for k in range(len(self.mtp_scored))))
        return jnp.stack(losses), output

    def _mtp_loss(self, model: Transformer, output: ModelOutput, k: int) -> Float[Array, ""]:
        length = self.labels.shape[1] - 1 - k
        logits = _logits(output.mtp_hidden[k], model)[:, :length]
        return _loss(logits, _targets(self.labels, k + 2, length), self.mtp_scored[k])


def _forward(model: Transformer, tokens: Array, mask: Array):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=tokens.dtype), tokens.shape)
    return model(
        tokens,
        segment_ids=mask.astype(tokens.dtype),
        positions=positions,
        return_router_logits=True,
        return_hidden_states=True,
    )


def _logits(hidden: Float[Array, "B S D"], model: Transformer) -> Float[Array, "B S V"]:
    return jnp.einsum("bsd,dv->bsv", hidden, model.unembed, precision=jax.lax.Precision.HIGHEST)


def _cross_entropy(
    logits: Float[Array, "B S V"], targets: np.ndarray, scored: np.ndarray
) -> Float[Array, "B S"]:
    """Nats of every target; 0 where nothing is scored. Written out here: the judge trusts no loss of ours."""
    picked = jnp.take_along_axis(logits, jnp.asarray(np.where(scored, targets, 0))[..., None], axis=-1)[
        ..., 0
    ]
    return jnp.where(scored, jax.nn.logsumexp(logits, axis=-1) - picked, 0)


def _loss(logits: Float[Array, "B S V"], targets: np.ndarray, scored: np.ndarray) -> Float[Array, ""]:
    return _mean(_cross_entropy(logits, targets, scored), scored)


def _mean(ce: Float[Array, "B S"], scored: np.ndarray) -> Float[Array, ""]:
    return jnp.sum(ce) / max(int(scored.sum()), 1)


def _scored(case: ModelCase, labels: np.ndarray) -> np.ndarray:
    """Positions that count in the loss: the case's own mask where it has one."""
    if "ce_mask" in case.expected:
        return case.expected["ce_mask"] != 0
    return _targets(labels, 1, labels.shape[1]) != IGNORED


def _mtp_scored(case: ModelCase, run: "_Run", k: int) -> np.ndarray:
    """Positions that count in the loss of MTP depth k (from 0)."""
    if f"mtp{k}_ce_mask" in case.expected:
        return case.expected[f"mtp{k}_ce_mask"] != 0
    length = run.labels.shape[1] - 1 - k
    real = run.mask[:, :length] & run.mask[:, k + 1 :]
    return real & (_targets(run.labels, k + 2, length) != IGNORED)


def _targets(labels: np.ndarray, ahead: int, length: int) -> np.ndarray:
    """Label `ahead` positions later for the first `length` positions; -100 beyond the row."""
    padded = np.pad(labels, ((0, 0), (0, ahead)), constant_values=IGNORED)
    return padded[:, ahead : ahead + length]


def _values(judge: Judge, case: ModelCase, run: _Run) -> None:
    expected, real, scored = case.expected, run.mask, run.scored
    targets = _targets(run.labels, 1, run.labels.shape[1])
    ce = _cross_entropy(jnp.asarray(run.logits), targets, scored)
    if "logits" in expected:
        judge.close("logits", "value", run.logits, expected["logits"], real)
    if "ce_mask" in expected:
        judge.equal("ce_mask", (targets != IGNORED).astype(np.int32), expected["ce_mask"])
    if "ce" in expected:
        judge.close("ce", "value", np.asarray(ce), np.where(scored, expected["ce"], 0))
    if "loss" in expected:
        judge.close("loss", "loss", np.asarray(_mean(ce, scored)).reshape(1), expected["loss"])
    if "last_hidden" in expected:
        judge.close("last_hidden", "value", np.asarray(run.output.hidden), expected["last_hidden"], real)
    if "hidden_states" in expected:
        assert run.output.hidden_states is not None
        states = np.concatenate([np.asarray(run.output.hidden_states), np.asarray(run.output.hidden)[None]])
        for layer, (ours, theirs) in enumerate(zip(states, expected["hidden_states"], strict=True)):
            judge.close(f"hidden_states[{layer}]", "value", ours, theirs, real)


def _routing(judge: Judge, case: ModelCase, run: _Run) -> None:
    expected = case.expected
    if "router_logits" not in expected and "topk_idx" not in expected:
        return
    router = run.output.router
    if router is None or router.logits is None or router.experts is None or router.weights is None:
        judge.failure("router", "the model returned no router logits")
        return
    num_layers = router.logits.shape[0] - run.model.config.num_mtp_layers
    if "router_logits" in expected:
        judge.close(
            "router_logits",
            "value",
            np.asarray(router.logits)[:num_layers],
            expected["router_logits"],
            _where(run, num_layers),
        )
    if "topk_idx" in expected:
        experts, weights = _sorted_choice(router.experts[:num_layers], router.weights[:num_layers])
        where = expected["topk_idx"][..., 0] >= 0
        judge.equal("topk_idx", experts, expected["topk_idx"], where)
        judge.close("topk_weights", "value", weights, expected["topk_weights"], where)


def _where(run: _Run, num_layers: int) -> np.ndarray:
    return np.broadcast_to(run.mask, (num_layers, *run.mask.shape))


def _sorted_choice(experts: Array, weights: Array) -> tuple[np.ndarray, np.ndarray]:
    """Chosen experts in rising order, and their weights."""
    index = np.asarray(experts)
    order = np.argsort(index, axis=-1)
    return np.take_along_axis(index, order, axis=-1), np.take_along_axis(np.asarray(weights), order, axis=-1)


def _mtp(judge: Judge, case: ModelCase, run: _Run) -> None:
    expected, model = case.expected, run.model
    depths = sorted({int(name[3 : name.index("_")]) for name in expected if name.startswith("mtp")})
    for k in depths:
        if k >= model.config.num_mtp_layers:
            judge.failure(f"mtp{k}", f"the model has {model.config.num_mtp_layers} MTP layers")
            continue
        length = run.labels.shape[1] - 1 - k
        # comparable where the position and the token it embeds are real
        real = run.mask[:, :length] & run.mask[:, k + 1 :]
        logits = _logits(run.output.mtp_hidden[k], model)[:, :length]
        targets = _targets(run.labels, k + 2, length)
        scored = run.mtp_scored[k]
        ce = _cross_entropy(logits, targets, scored)
        if f"mtp{k}_logits" in expected:
            judge.close(f"mtp{k}_logits", "value", np.asarray(logits), expected[f"mtp{k}_logits"], real)
        if f"mtp{k}_ce_mask" in expected:
            judge.equal(
                f"mtp{k}_ce_mask", (targets != IGNORED).astype(np.int32), expected[f"mtp{k}_ce_mask"], real
            )
        if f"mtp{k}_ce" in expected:
            judge.close(f"mtp{k}_ce", "value", np.asarray(ce), np.where(scored, expected[f"mtp{k}_ce"], 0))
        if f"mtp{k}_loss" in expected:
            judge.close(
                f"mtp{k}_loss", "loss", np.asarray(_mean(ce, scored)).reshape(1), expected[f"mtp{k}_loss"]
            )
        if f"mtp{k}_topk_idx" in expected:
            _mtp_routing(judge, case, run, k, length, real)


def _mtp_routing(judge: Judge, case: ModelCase, run: _Run, k: int, length: int, real: np.ndarray) -> None:
    router = run.output.router
    assert router is not None
    assert router.experts is not None
    assert router.weights is not None
    layer = router.logsumexp.shape[0] - run.model.config.num_mtp_layers + k
    experts, weights = _sorted_choice(router.experts[layer, :, :length], router.weights[layer, :, :length])
    where = (case.expected[f"mtp{k}_topk_idx"][..., 0] >= 0) & real
    judge.equal(f"mtp{k}_topk_idx", experts, case.expected[f"mtp{k}_topk_idx"], where)
    judge.close(f"mtp{k}_topk_weights", "value", weights, case.expected[f"mtp{k}_topk_weights"], where)


def _gradients(judge: Judge, case: ModelCase, run: _Run) -> None:
    summaries = {"main": case.meta.get("grad_summary"), "mtp": case.meta.get("mtp_grad_summary")}
    for loss in ("main", "mtp"):
        grads = {
            key.removeprefix(f"{loss}/"): g for key, g in case.grads.items() if key.startswith(f"{loss}/")
        }
        summary = summaries[loss] or {}
        if not grads and not summary:
            continue
        if loss not in run.gradients:
            judge.failure(f"grad {loss}", "the model has no such loss")
            continue
        noise = rounding_noise(
            [*(float(np.linalg.norm(g)) for g in grads.values()), *(norm for norm, _ in summary.values())]
        )
        ours = _with_other_names(to_checkpoint_tensors(run.gradients[loss]), [*grads, *summary])
        for key in sorted(grads):
            if key in ours:
                judge.gradient(f"grad {loss}/{key}", ours[key], grads[key], noise)
            else:
                judge.failure(f"grad {loss}/{key}", "this model has no such tensor")
        for key in sorted(summary):
            if key in ours:
                error = summary_error(ours[key], tuple(summary[key]), noise)
                judge.add(f"norm+probe {loss}/{key}", "gradient", error)
            else:
                judge.failure(f"norm+probe {loss}/{key}", "this model has no such tensor")


def _with_other_names(ours: dict[str, np.ndarray], names: list[str]) -> dict[str, np.ndarray]:
    """`ours`, with the output projection of KDA layers under both names, and shared experts of size 0."""
    result = dict(ours)
    for name in names:
        if name in result:
            continue
        if name.endswith("attention.dense.weight"):
            other = name.replace("dense", "o_proj")
            if other in result:
                result[name] = result[other]
        elif ".mlp.shared_experts." in name:
            result[name] = np.zeros(0)
    return result
