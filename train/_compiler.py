"""Options of the XLA compiler that training programs are compiled with."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
from jax.sharding import Mesh


def compiler_options(mesh: Mesh) -> dict[str, str | bool]:
    """Options for programs on the devices of `mesh`, for `jax.jit(..., compiler_options=...)`.

    TPUs: the kernel for `ragged_dot`, which libtpu 0.0.52 takes on v5p by itself. On v6e and tpu7x it would multiply
    every row with the matrices of all experts.
    """
    if mesh.devices.flat[0].platform != "tpu":
        return {}
    return {"xla_tpu_enable_ragged_dot_kernel": True}


def compiled_for(mesh: Mesh, function: Callable, **options: Any) -> Any:
    """`eqx.filter_jit(function, **options)` with the compiler options of `mesh`."""
    # Its type hints leave out what it hands on to `jax.jit`.
    filter_jit: Any = eqx.filter_jit
    return filter_jit(function, compiler_options=compiler_options(mesh), **options)
