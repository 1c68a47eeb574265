"""Experts: every token passes the few it is routed to, and the shared ones.

Nothing is dropped, unless a mesh with an expert axis is given a buffer that is too small for what its routers send.
"""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from ._config import MoeConfig
from ._constants import LayerConstants
from ._expert_exchange import ExchangeWork
from ._ffn import SwiGlu, init_swiglu, swiglu
from ._grouped import grouped_matmul
from ._linear import init_normal
from ._parallel import Parallel
from ._parallel_experts import Copies, run_across
from ._parallel_visits import run_visited
from ._param import matrix
from ._router import Router, RouterFacts, init_router, router_facts
from ._rows import Rows


class Experts(eqx.Module):
    """E SwiGLUs of equal width."""

    gate: Float[Array, "E D F"] = eqx.field(metadata=matrix("D", "F"))
    up: Float[Array, "E D F"] = eqx.field(metadata=matrix("D", "F"))
    down: Float[Array, "E F D"] = eqx.field(metadata=matrix("F", "D"))


class Moe(eqx.Module):
    """`sum over chosen experts of weight * expert(x)`, plus the shared expert unweighted."""

    router: Router
    experts: Experts
    shared: SwiGlu | None

    def __call__(
        self, x: Float[Array, "B S D"], rows: Rows, constants: LayerConstants | None = None
    ) -> tuple[Float[Array, "B S D"], RouterFacts]:
        """The layer's output, and what its router says."""
        constants = LayerConstants() if constants is None else constants
        routing = self.router(x)
        batch, length, width = x.shape
        tokens = jnp.reshape(x, (batch * length, width))
        chosen = jnp.reshape(routing.experts, (batch * length, -1))
        weights = jnp.reshape(routing.weights, chosen.shape)
        y, overflow = run_experts(
            self.experts, tokens, chosen, weights, constants.routed_limit, rows.parallel
        )
        y = jnp.reshape(y, x.shape)
        if self.shared is not None:
            y = y + self.shared(x, rows.axes, constants.shared_limit)
        return y, router_facts(routing, rows.router_mask, overflow)


def run_experts(
    experts: Experts,
    tokens: Float[Array, "T D"],
    chosen: Int[Array, "T A"],
    weights: Float[Array, "T A"],
    limit: Float[Array, ""] | None = None,
    parallel: Parallel | None = None,
) -> tuple[Float[Array, "T D"], Int[Array, ""] | None]:
    """Each token's weighted sum over its chosen experts, and how many of this device's copies were dropped.

    Tokens are copied A times, sorted by expert, multiplied in groups and sorted back. The weight multiplies before
    the down projection, where it is F wide.

    Args:
        experts: The experts.
        tokens: Tokens of all rows.
        chosen: Experts of each token, all different.
        weights: Their factors.
        limit: SwiGLU clamp.
        parallel: With an expert axis, `experts` are those of this device and tokens travel to theirs, or experts to
            the tokens.

    Returns:
        The sums; the number of copies without a place, which weigh 0 in them, or None where all have one.
    """
    mesh = None if parallel is None or parallel.expert_axis is None else parallel
    num_local, num_chosen = experts.gate.shape[0], chosen.shape[1]
    num_experts = num_local * (1 if mesh is None else mesh.size(mesh.expert_axis))
    flat = jnp.reshape(chosen, chosen.size)
    order = jnp.argsort(flat, stable=True)
    inverse = jnp.argsort(order)
    copies = Copies(
        rows=_spread(tokens, order, inverse, num_chosen),
        weights=jnp.reshape(weights, chosen.size)[order],
        experts=flat[order],
        group_sizes=jnp.bincount(flat, length=num_experts).astype(jnp.int32),
    )
    if mesh is None:
        done, overflow = expert_products(experts, *copies[:2], copies.group_sizes, limit), None
    else:
        done, overflow = _exchange(experts, copies, limit, mesh, num_chosen)
    return _collect(done, order, inverse, num_chosen), overflow


def expert_products(
    experts: Experts,
    x: Float[Array, "N D"],
    weights: Float[Array, " N"],
    group_sizes: Int[Array, " E"],
    limit: Float[Array, ""] | None,
) -> Float[Array, "N D"]:
    """Rows sorted by expert through their expert, times their weight; rows beyond the groups come out undefined."""
    dtype = x.dtype
    gate = grouped_matmul(x, experts.gate.astype(dtype), group_sizes)
    up = grouped_matmul(x, experts.up.astype(dtype), group_sizes)
    hidden = (swiglu(gate, up, limit) * weights[:, None]).astype(dtype)
    return grouped_matmul(hidden, experts.down.astype(dtype), group_sizes)


def _exchange(
    experts: Experts, copies: Copies, limit: Array | None, mesh: Parallel, num_chosen: int
) -> tuple[Float[Array, "N D"], Int[Array, ""] | None]:
    """`expert_products` of copies whose experts are on several devices, and how many copies were dropped."""
    num_local, width, expert_size = experts.gate.shape
    work = ExchangeWork(
        num_tokens=copies.rows.shape[0] // num_chosen,
        num_chosen=num_chosen,
        num_experts=copies.group_sizes.shape[0],
        num_devices=copies.group_sizes.shape[0] // num_local,
        model_size=width,
        expert_size=expert_size,
        compute_bytes=copies.rows.dtype.itemsize,
        gather_bytes=jnp.dtype(mesh.gather_dtype).itemsize,
        reduce_bytes=jnp.dtype(mesh.reduce_dtype).itemsize,
    )
    if work.choose(mesh.exchange) == "weights":
        return run_visited(expert_products, mesh, experts, *copies[:2], copies.group_sizes, limit), None

    def products(x: Array, weights: Array, group_sizes: Array) -> Array:
        return expert_products(experts, x, weights, group_sizes, limit)

    return run_across(copies, work, products, mesh)


# `_spread` and `_collect` are each other's transposes. Both are gathers: left alone, the gradient of a gather is a
# scatter-add, which is slow on every platform.


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _spread(
    tokens: Float[Array, "T D"], order: Int[Array, " N"], inverse: Int[Array, " N"], num_copies: int
) -> Float[Array, "N D"]:
    """`num_copies` copies of every token, in `order`."""
    return tokens[order // num_copies]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _collect(
    rows: Float[Array, "N D"], order: Int[Array, " N"], inverse: Int[Array, " N"], num_copies: int
) -> Float[Array, "T D"]:
    """The sum of every token's copies."""
    # Copies first: with the copies of a token side by side a TPU pads them to whole tiles, and moves all to do so.
    return jnp.sum(rows[jnp.reshape(inverse, (-1, num_copies)).T], axis=0)


_spread.defvjp(
    lambda tokens, order, inverse, num_copies: (
        _spread(tokens, order, inverse, num_copies),
        (order, inverse),
    ),
    lambda num_copies, permutation, g: (_collect(g, *permutation, num_copies), None, None),
)
_collect.defvjp(
    lambda rows, order, inverse, num_copies: (_collect(rows, order, inverse, num_copies), (order, inverse)),
    lambda num_copies, permutation, g: (_spread(g, *permutation, num_copies), None, None),
)


def init_moe(config: MoeConfig, hidden_size: int, std: float, *, key: PRNGKeyArray) -> Moe:
    """Normal weights of standard deviation `std`; router bias 0."""
    router_key, gate_key, up_key, down_key, shared_key = jax.random.split(key, 5)
    num_experts, width = config.num_experts, config.moe_intermediate_size
    shared_width = config.shared_intermediate_size
    return Moe(
        router=init_router(config, hidden_size, std, key=router_key),
        experts=Experts(
            gate=init_normal((num_experts, hidden_size, width), std, key=gate_key),
            up=init_normal((num_experts, hidden_size, width), std, key=up_key),
            down=init_normal((num_experts, width, hidden_size), std, key=down_key),
        ),
        shared=init_swiglu(hidden_size, shared_width, std, key=shared_key) if shared_width else None,
    )
