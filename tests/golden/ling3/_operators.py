"""Judges an operator file: the KDA recurrence, by chunks and by steps, with every gradient."""

import jax
import jax.numpy as jnp
import numpy as np

from model._kda import kda_chunked, kda_recurrent, l2_normalize

from ._folder import OperatorCase
from ._report import FAST_COMPILATION, Judge, Line, Precision

FORMS = {"chunked": kda_chunked, "recurrent": kda_recurrent}


def judge_operator(case: OperatorCase, precision: Precision) -> list[Line]:
    """`o`, `s1` and the gradient of `sum(o * probe) + sum(s1 * probe)` for every input, for both forms of KDA."""
    judge = Judge(case.name, precision)
    dtype = np.dtype(precision)
    names = [name for name in ("q", "k", "v", "g", "beta", "s0") if name in case.tensors]
    inputs = {name: jnp.asarray(case.tensors[name].astype(dtype)) for name in names}
    for form, operator in FORMS.items():

        def run(inputs, operator=operator):
            q = l2_normalize(inputs["q"]) * inputs["q"].shape[-1] ** -0.5
            k = l2_normalize(inputs["k"])
            return operator(q, k, inputs["v"], inputs["g"], inputs["beta"], initial_state=inputs.get("s0"))

        def probed(inputs, run=run):
            o, s1 = run(inputs)
            return jnp.sum(o * _probe(o.shape, dtype)) + jnp.sum(s1 * _probe(s1.shape, dtype)), (o, s1)

        try:
            gradient = jax.grad(probed, has_aux=True)
            gradients, (o, s1) = jax.jit(gradient, compiler_options=FAST_COMPILATION)(inputs)
        except Exception as error:  # one broken form must not hide the other cases
            judge.failure(f"{form}", f"{type(error).__name__}: {str(error).splitlines()[0][:120]}")
            continue
        for name, value in (("o", o), ("s1", s1)):
            if name in case.tensors:
                judge.close(f"{form}.{name}", "value", np.asarray(value), case.tensors[name])
        for name in names:
            if f"d{name}" in case.tensors:
                judge.gradient(f"{form}.d{name}", np.asarray(gradients[name]), case.tensors[f"d{name}"])
    return judge.lines


def _probe(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """sin(1), sin(2), ... in row-major order."""
    return np.sin(np.arange(1, int(np.prod(shape)) + 1, dtype=np.float64)).reshape(shape).astype(dtype)
