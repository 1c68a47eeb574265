"""Experts: every token passes the few it is routed to, and the shared ones.

Nothing is dropped, unless a mesh with an expert axis is given a buffer that is too small for what its routers send.
"""

import functools
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, DTypeLike, Float, Int, PRNGKeyArray

from ._config import MoeConfig
from ._constants import LayerConstants
from ._expert_blocks import Matrices, blocked_experts, blocked_experts_backward
from ._expert_exchange import ExchangeWork
from ._ffn import SwiGlu, init_swiglu
from ._grouped import grouped_matmul, quantized_grouped_matmul
from ._linear import init_normal
from ._parallel import Parallel
from ._parallel_experts import Copies, run_across
from ._parallel_tensor import alone, cut_along, on_own_cut, sum_of_cuts
from ._parallel_visits import run_visited
from ._parallel_weights import whole, whole_beside, whole_field
from ._param import matrix
from ._quantized import current_quantization, with_quantization
from ._router import Router, RouterFacts, init_router, router_facts
from ._rows import Rows
from ._swiglu import swiglu


class Experts(eqx.Module):
    """E SwiGLUs of equal width."""

    gate: Float[Array, "E D F"] = eqx.field(metadata=matrix("D", "F"))
    up: Float[Array, "E D F"] = eqx.field(metadata=matrix("D", "F"))
    down: Float[Array, "E F D"] = eqx.field(metadata=matrix("F", "D"))


class GatheredExperts(eqx.Module):
    """`Experts` with gate and up side by side: one product reads the rows once, and one makes their whole gradient."""

    gate_up: Float[Array, "E D F2"]
    down: Float[Array, "E F D"]


class Moe(eqx.Module):
    """`sum over chosen experts of weight * expert(x)`, plus the shared expert unweighted."""

    router: Router
    experts: Experts | GatheredExperts
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


def whole_moe(moe: Moe, parallel: Parallel | None) -> Moe:
    """`whole` of `moe`, with its experts as `gathered_experts` has them."""
    if parallel is None:
        return moe
    assert isinstance(moe.experts, Experts)  # nothing is gathered twice
    return Moe(
        router=whole(moe.router, parallel),
        experts=gathered_experts(moe.experts, parallel),
        shared=None if moe.shared is None else whole(moe.shared, parallel),
    )


def gathered_experts(experts: Experts, parallel: Parallel) -> Experts | GatheredExperts:
    """`whole` of `experts`, gate and up side by side where they travel anyway."""
    # Not on CPUs, where blocks read one matrix after the other; in 8 bits each has scales of its own.
    if (
        parallel.platform == "cpu"
        or not (parallel.fsdp_axes or parallel.context_axis)
        or parallel.expert_axis is not None
        or current_quantization() is not None
    ):
        return whole(experts, parallel)
    return GatheredExperts(
        gate_up=whole_beside(experts, ("gate", "up"), parallel),
        down=whole_field(experts, "down", parallel),
    )


def run_experts(
    experts: Experts | GatheredExperts,
    tokens: Float[Array, "T D"],
    chosen: Int[Array, "T A"],
    weights: Float[Array, "T A"],
    limit: Float[Array, ""] | None = None,
    parallel: Parallel | None = None,
) -> tuple[Float[Array, "T D"], Int[Array, ""] | None]:
    """Each token's weighted sum over its chosen experts, and how many of this device's copies were dropped.

    Tokens are copied A times, sorted by expert, multiplied in groups and sorted back. The weight multiplies before
    the down projection, where it is F wide. Where the tensor axis cuts the width of every expert, a token's copies are
    added up before devices are: the compiler alone would add up every copy over them.

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
    if parallel is None or parallel.tensor_axis is None:
        return _run_experts(experts, tokens, chosen, weights, limit, parallel)

    def own(experts: Any, tokens: Array, chosen: Array, weights: Array, limit: Array | None) -> Any:
        y, overflow = _run_experts(experts, tokens, chosen, weights, limit, alone(parallel))
        return sum_of_cuts(y, parallel), overflow

    whole, columns, rows = PartitionSpec(), cut_along(2, parallel), cut_along(1, parallel)
    cuts = jax.tree.map(lambda _: columns, experts)
    cuts = eqx.tree_at(lambda tree: tree.down, cuts, rows)
    run = on_own_cut(own, parallel, (cuts, *[whole] * 4), whole)
    return run(experts, tokens, chosen, weights, limit)


def _run_experts(
    experts: Experts | GatheredExperts,
    tokens: Float[Array, "T D"],
    chosen: Int[Array, "T A"],
    weights: Float[Array, "T A"],
    limit: Float[Array, ""] | None,
    parallel: Parallel | None,
) -> tuple[Float[Array, "T D"], Int[Array, ""] | None]:
    """`run_experts` of what one device has of the width of every expert."""
    mesh = None if parallel is None or parallel.expert_axis is None else parallel
    num_local, num_chosen = experts.down.shape[0], chosen.shape[1]
    num_experts = num_local * (1 if mesh is None else mesh.size(mesh.expert_axis))
    flat, weights = jnp.reshape(chosen, chosen.size), jnp.reshape(weights, chosen.size)
    order = jnp.argsort(flat, stable=True)
    order = _Order(order, jnp.argsort(order), jnp.bincount(flat, length=num_experts).astype(jnp.int32))
    if mesh is None:
        # A caller that does not name its devices may be on a CPU.
        in_blocks = (parallel is None or parallel.platform == "cpu") and current_quantization() is None
        if in_blocks and isinstance(experts, Experts):
            return _run_on_cpu(num_chosen, experts, limit, tokens, weights, order), None
        return _run_in_groups(num_chosen, experts, limit, tokens, weights, order), None
    assert isinstance(experts, Experts)  # not gathered
    copies = Copies(
        rows=_spread(tokens, order.order, order.inverse, num_chosen),
        weights=weights[order.order],
        experts=flat[order.order],
        group_sizes=order.group_sizes,
    )
    done, overflow = _exchange(experts, copies, limit, mesh, num_chosen)
    return _collect(done, order.order, order.inverse, num_chosen), overflow


class _Order(NamedTuple):
    """Copies sorted by expert.

    Attributes:
        order: Which copy comes where.
        inverse: Where each copy went.
        group_sizes: Copies for each expert.
    """

    order: Int[Array, " N"]
    inverse: Int[Array, " N"]
    group_sizes: Int[Array, " E"]


def _run_in_groups(
    num_chosen: int,
    experts: Experts | GatheredExperts,
    limit: Array | None,
    tokens: Array,
    weights: Array,
    order: _Order,
) -> Float[Array, "T D"]:
    """`run_experts` of experts that are all here."""
    rows = _spread(tokens, order.order, order.inverse, num_chosen)
    done = expert_products(experts, rows, weights[order.order], order.group_sizes, limit)
    return _collect(done, order.order, order.inverse, num_chosen)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run_on_cpu(
    num_chosen: int, experts: Experts, limit: Array | None, tokens: Array, weights: Array, order: _Order
) -> Float[Array, "T D"]:
    """`_run_in_groups` by blocks where the program is lowered for a CPU; only the arguments are kept."""
    arguments = (experts, limit, tokens, weights, order)
    cpu, default = (functools.partial(form, num_chosen) for form in (_run_in_blocks, _run_in_groups))
    return jax.lax.platform_dependent(*arguments, cpu=cpu, default=default)


def _run_on_cpu_backward(num_chosen, arguments, slopes):
    cpu, default = (functools.partial(form, num_chosen) for form in (_block_slopes, _group_slopes))
    d_experts, d_tokens, d_weights = jax.lax.platform_dependent(*arguments, slopes, cpu=cpu, default=default)
    return d_experts, None, d_tokens, d_weights, None


_run_on_cpu.defvjp(
    lambda num_chosen, *arguments: (_run_on_cpu(num_chosen, *arguments), arguments), _run_on_cpu_backward
)


def _run_in_blocks(num_chosen, experts, limit, tokens, weights, order):
    matrices = _cast(experts, tokens.dtype)
    source = order.order // num_chosen
    rows = blocked_experts(matrices, limit, tokens, weights[order.order], source, order.group_sizes)
    return _collect(rows, order.order, order.inverse, num_chosen)


def _block_slopes(num_chosen, experts, limit, tokens, weights, order, slopes):
    matrices = _cast(experts, tokens.dtype)
    source = order.order // num_chosen
    d_matrices, d_rows, d_weights = blocked_experts_backward(
        matrices, limit, tokens, weights[order.order], source, order.group_sizes, slopes
    )
    d_experts = jax.tree.map(lambda d, x: d.astype(x.dtype), Experts(*d_matrices), experts)
    return d_experts, _collect(d_rows, order.order, order.inverse, num_chosen), d_weights[order.inverse]


def _group_slopes(num_chosen, experts, limit, tokens, weights, order, slopes):
    def run(experts, tokens, weights):
        return _run_in_groups(num_chosen, experts, limit, tokens, weights, order)

    return jax.vjp(run, experts, tokens, weights)[1](slopes)


def _cast(experts: Experts, dtype: DTypeLike) -> Matrices:
    return experts.gate.astype(dtype), experts.up.astype(dtype), experts.down.astype(dtype)


def expert_products(
    experts: Experts | GatheredExperts,
    x: Float[Array, "N D"],
    weights: Float[Array, " N"],
    group_sizes: Int[Array, " E"],
    limit: Float[Array, ""] | None,
) -> Float[Array, "N D"]:
    """Rows sorted by expert through their expert, times their weight; rows beyond the groups come out undefined."""
    multiply, quantization = grouped_matmul, current_quantization()
    if quantization is not None:
        multiply = functools.partial(quantized_grouped_matmul, quantization)
    if isinstance(experts, GatheredExperts):
        gate, up = jnp.split(multiply(x, experts.gate_up.astype(x.dtype), group_sizes), 2, axis=1)
    else:
        gate, up = (multiply(x, matrix.astype(x.dtype), group_sizes) for matrix in (experts.gate, experts.up))
    hidden = (swiglu(gate, up, limit) * weights[:, None]).astype(x.dtype)
    return multiply(hidden, experts.down.astype(x.dtype), group_sizes)


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
        quantized = with_quantization(expert_products, current_quantization())
        return run_visited(quantized, mesh, experts, *copies[:2], copies.group_sizes, limit), None

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
    rows: Float[Array, "M D"], order: Int[Array, " N"], inverse: Int[Array, " N"], num_copies: int
) -> Float[Array, "T D"]:
    """The sum of every token's copies. Rows after the N copies do not count, and are not for `_collect`'s gradient."""
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
