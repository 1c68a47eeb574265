"""Sums that know their counts: the only place of this package where a mean is formed."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Real


class SumCount(eqx.Module):
    """A sum and the number it will be divided by, kept apart until the end.

    Adding two `SumCount`s pools them, so micro-steps, hosts and steps of a log interval
    may be added in any order and grouping before the one division.

    Attributes:
        sum: Sum of the values (nats for a loss).
        count: What `value` divides by (tokens, groups or positions), same shape as `sum`.
    """

    sum: Float[Array, "*shape"]
    count: Float[Array, "*shape"]

    def __add__(self, other: "SumCount") -> "SumCount":
        """Pools both: sums add, counts add."""
        return SumCount(sum=self.sum + other.sum, count=self.count + other.count)

    def value(self) -> Float[Array, "*shape"]:
        """The mean, `sum / count`; 0 with zero gradient where `count` is 0."""
        return guarded_ratio(self.sum, self.count)


def zero_sum_count(shape: tuple[int, ...] = ()) -> SumCount:
    """The neutral element of addition: sum 0 and count 0 of the given shape."""
    return SumCount(sum=jnp.zeros(shape), count=jnp.zeros(shape))


def sum_count(values: Float[Array, "*shape"], mask: Bool[Array, "*shape"]) -> SumCount:
    """The scalar (sum, count) of `values` where `mask` is True.

    Values outside the mask may be NaN or Inf: they are replaced by 0 before the sum, so they
    reach neither the value nor the gradient.
    """
    kept = jnp.where(mask, values, 0)
    return SumCount(sum=jnp.sum(kept), count=jnp.sum(mask, dtype=kept.dtype))


def guarded_ratio(
    numerator: Float[Array, "*shape"], denominator: Real[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """`numerator / denominator`, and 0 with zero gradient where `denominator` is 0.

    No epsilon is added, so a non-empty mean is exact. Megatron's `max(count, 1)` equals this
    for integer counts; for fractional counts below 1 only this form is a mean.
    """
    present = denominator != 0
    return jnp.where(present, numerator / jnp.where(present, denominator, 1), 0)
