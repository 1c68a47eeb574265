"""Logits and linear heads."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import eqx_loss
from eqx_loss import Granularity

from ._registry import MASKS, Values, config_of, first_name, numbers, solver
from ._tokens import MODES, mode_weights


@solver
def from_logits(kind: str, inputs: dict) -> Values:
    if "logits" not in inputs or not {"targets", "labels"} & set(inputs):
        return {}
    config = config_of(inputs)
    logits = numbers(inputs["logits"])
    targets = np.asarray(inputs.get("targets", inputs.get("labels")))
    flat = logits.ndim == 2
    if flat:
        logits, targets = logits[None], targets[None]
    mask = targets != config.get("ignore_index", -100)
    mask_name = first_name(inputs, MASKS)
    if mask_name:
        mask &= np.asarray(inputs[mask_name]).reshape(mask.shape) != 0
    if "labels" in inputs or "labels[:, t+1]" in str(config.get("alignment", "")):
        segments = np.asarray(inputs.get("segment_ids", np.ones_like(targets))).reshape(targets.shape)
        shifted, has_target = eqx_loss.next_token_targets(
            jnp.asarray(targets), jnp.asarray(segments), jnp.asarray(mask)
        )
        targets, mask = np.asarray(shifted), np.asarray(has_target)
    dtype = jnp.bfloat16 if "bfloat16" in str(config.get("logits_dtype", "")) else jnp.float64
    options = _xent_options(config)
    z_weight = _z_weight(config)
    mode = str(config.get("objective", "token_mean")).split("(")[0].split()[0]
    weights = mode_weights(mask, mode if mode in MODES else "token_mean", config)

    def total(x: jax.Array, multiplier: float) -> tuple[jax.Array, eqx_loss.HeadLoss]:
        losses = eqx_loss.cross_entropy(x, jnp.asarray(targets), jnp.asarray(mask), **options)
        head = eqx_loss.head_loss(losses, weights, z_loss_multiplier=multiplier)
        return head.objective + head.z_objective, head

    x = jnp.asarray(logits, dtype)
    (value, head), gradient = jax.value_and_grad(total, has_aux=True)(x, z_weight)
    log = eqx_loss.sum_count(head.xent, jnp.asarray(mask))
    pick = (
        (lambda a: np.asarray(a, np.float64)[0].tolist())
        if flat
        else (lambda a: np.asarray(a, np.float64).tolist())
    )
    out: Values = {
        "loss": float(value),
        "mean": float(log.value()),
        "sum": float(log.sum),
        "none": pick(head.xent),
        "per_token_xent": pick(head.xent),
        "n_tokens": float(log.count),
        "n_targets": float(log.count),
        "grad_logits": pick(gradient),
        "cross_entropy": float(head.objective),
        "z_loss": float(head.z_objective),
        "z_term": float(eqx_loss.sum_count(head.z_term, jnp.asarray(mask)).value()),
        "loss_mask": pick(mask),
        "targets": pick(targets),
        "total": float(value),
        "total_with_z_off": float(total(x, 0.0)[0]),
        "perplexity": float(eqx_loss.perplexity(log)),
    }
    for length in config.get("chunk_lengths", ()):
        parts = [
            eqx_loss.head_loss(
                eqx_loss.cross_entropy(
                    x[:, i : i + length],
                    jnp.asarray(targets[:, i : i + length]),
                    jnp.asarray(mask[:, i : i + length]),
                    **options,
                ),
                weights[:, i : i + length],
            )
            for i in range(0, x.shape[1], length)
        ]
        # float64 sums in another order; the whole one is judged against the file.
        np.testing.assert_allclose(sum(float(p.objective) for p in parts), float(head.objective), rtol=1e-12)
    return out


def _z_weight(config: dict) -> float:
    name = first_name(config, r"(lm_head_|head_)?z(_loss)?_(weight|multiplier|coefficient|coef|coeff|scale)")
    return 0.0 if name is None else float(config[name])


def _xent_options(config: dict) -> dict:
    names = {
        "label_smoothing": ("label_smoothing", "smoothing"),
        "logit_soft_cap": (
            "logit_soft_cap",
            "soft_cap",
            "softcap",
            "logit_softcap",
            "final_logit_softcapping",
        ),
        "vocab_size": ("vocab_size", "real_vocab_size", "true_vocab_size", "valid_vocab"),
    }
    found = {}
    for option, spellings in names.items():
        for spelling in spellings:
            if config.get(spelling) is not None:
                found[option] = config[spelling]
    return found


@solver
def linear_head(kind: str, inputs: dict) -> Values:
    if not {"hidden", "head", "targets"} <= set(inputs):
        return {}
    config = config_of(inputs)
    hidden, head = jnp.asarray(numbers(inputs["hidden"]))[None], jnp.asarray(numbers(inputs["head"]))
    targets = np.asarray(inputs["targets"])[None]
    mask = targets != config.get("ignore_index", -100)
    mask_name = first_name(inputs, MASKS)
    if mask_name:
        mask &= np.asarray(inputs[mask_name]).reshape(mask.shape) != 0
    upstream = inputs.get("upstream_gradient_per_token")
    weights = (
        eqx_loss.token_weights(jnp.asarray(mask), Granularity.TOKEN)
        if upstream is None
        else jnp.asarray(numbers(upstream))[None]
    )

    def objective(h: jax.Array, w: jax.Array, part: np.ndarray) -> jax.Array:
        losses = eqx_loss.cross_entropy(
            jnp.einsum("bsd,dv->bsv", h[:, part], w),
            jnp.asarray(targets)[:, part],
            jnp.asarray(mask)[:, part],
            **_xent_options(config),
        )
        head = eqx_loss.head_loss(losses, weights[:, part], z_loss_multiplier=_z_weight(config))
        return head.objective + head.z_objective

    everything = np.arange(targets.shape[1])
    results = []
    cuts = [
        [everything[i : i + length].tolist() for i in range(0, everything.size, length)]
        for length in config.get("chunk_lengths", ())
    ]
    for partition in [*(config.get("partitions") or [[everything.tolist()]]), *cuts]:
        pieces = [jax.value_and_grad(objective, (0, 1))(hidden, head, np.asarray(part)) for part in partition]
        results.append(jax.tree.map(lambda *leaves: sum(leaves), *pieces))
    for result in results[1:]:
        for found, expected in zip(jax.tree.leaves(result), jax.tree.leaves(results[0])):
            np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-15)
    loss, (grad_hidden, grad_head) = results[0]
    return {
        "loss": float(loss),
        "grad_head": np.asarray(grad_head).tolist(),
        "grad_hidden": np.asarray(grad_hidden[0]).tolist(),
        "grad_head_frobenius_norm": float(optax.global_norm(grad_head)),
        "n_tokens": float(mask.sum()),
    }


@solver
def distillation(kind: str, inputs: dict) -> Values:
    if not {"student_logits", "teacher_logits"} <= set(inputs):
        return {}
    config = config_of(inputs)
    student, teacher = (numbers(inputs[name]) for name in ("student_logits", "teacher_logits"))
    shape = student.shape[:-1]
    student, teacher = (jnp.asarray(x.reshape(-1, *x.shape[-2:])) for x in (student, teacher))
    mask = jnp.ones(student.shape[:-1], bool)
    mask_name = first_name(inputs, MASKS)
    if mask_name:
        mask = jnp.asarray(np.asarray(inputs[mask_name]).reshape(mask.shape) != 0)
    weights = eqx_loss.token_weights(mask, Granularity.TOKEN)

    def total(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        values = eqx_loss.distillation_kl(x, teacher, mask, temperature=float(config.get("temperature", 1.0)))
        return jnp.sum(weights * values), values

    (value, values), gradient = jax.value_and_grad(total, has_aux=True)(student)
    return {
        "loss": float(value),
        "kl": float(value),
        "per_token_kl": np.asarray(values).reshape(shape).tolist(),
        "grad_student_logits": np.asarray(gradient).reshape(*shape, -1).tolist(),
        "n_tokens": float(mask.sum()),
    }
