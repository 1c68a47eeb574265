"""Values that a compiler makes once.

Left alone it makes a cheap value again in the fusion of every user, and reads all that the value is made of each time.
"""

from typing import TypeVar

import jax
from jaxtyping import PyTree

T = TypeVar("T", bound=PyTree)


@jax.custom_vjp
def made_once(x: T) -> T:
    """`x`; on TPUs it is made before its first user, together where it is several arrays. Its slope passes."""
    return _barrier_on_tpu(x)


@jax.custom_vjp
def slope_made_once(x: T) -> T:
    """`x`; on TPUs its slope, the sum over all users of `x`, is made before its first user."""
    return x


def made_once_on_cpu(x: T) -> T:
    """`x`; on CPUs it is made before its first user."""
    return jax.lax.platform_dependent(x, cpu=jax.lax.optimization_barrier, default=lambda x: x)


def _barrier_on_tpu(x: T) -> T:
    return jax.lax.platform_dependent(x, tpu=jax.lax.optimization_barrier, default=lambda x: x)


made_once.defvjp(lambda x: (_barrier_on_tpu(x), None), lambda _, slope: (slope,))
slope_made_once.defvjp(lambda x: (x, None), lambda _, slope: (_barrier_on_tpu(slope),))
