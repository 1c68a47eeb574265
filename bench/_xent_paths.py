"""The fused output layer and its peers as `objective(hidden, unembed, targets, weights)` of T tokens.

All give `sum(weights * xent)`; hidden is `[T, D]`, unembed `[D, V]`.
"""

import functools

import jax
import jax.numpy as jnp
import optax

import eqx_loss

MAXTEXT_TILES = 8  # num_vocab_tiling, which cuts tokens in spite of its name


def ours(hidden, unembed, targets, weights, execution=None):
    execution = eqx_loss.XentExecution() if execution is None else execution
    return eqx_loss.linear_cross_entropy(
        hidden[None], unembed, targets[None], weights[None], execution=execution
    ).objective


def plain_jax(hidden, unembed, targets, weights):
    """What one writes without thinking of memory: all logits, `log_softmax`, a gather."""
    log_p = jax.nn.log_softmax(_logits(hidden, unembed))
    return -jnp.sum(weights * jnp.take_along_axis(log_p, targets[:, None], axis=-1)[:, 0])


def optax_integer_labels(hidden, unembed, targets, weights):
    xent = optax.softmax_cross_entropy_with_integer_labels(_logits(hidden, unembed), targets)
    return jnp.sum(weights * xent)


@jax.custom_vjp
def maxtext_tiling(hidden, unembed, targets, weights):
    """MaxText's `num_vocab_tiling`, re-expressed: chunks of tokens forward, the same chunks again backward.

    Source: AI-Hypercomputer/maxtext, `vocab_tiling_linen_loss` (read, not installed).
    """
    return _maxtext_forward(hidden, unembed, targets, weights)[0]


def _maxtext_chunk(hidden, unembed, targets, weights):
    return optax_integer_labels(hidden, unembed, targets, weights)


def _maxtext_chunks(*arrays):
    return tuple(x.reshape(MAXTEXT_TILES, x.shape[0] // MAXTEXT_TILES, *x.shape[1:]) for x in arrays)


def _maxtext_forward(hidden, unembed, targets, weights):
    def add(total, chunk):
        return total + _maxtext_chunk(chunk[0], unembed, *chunk[1:]), None

    total, _ = jax.lax.scan(add, jnp.zeros(()), _maxtext_chunks(hidden, targets, weights))
    return total, (hidden, unembed, targets, weights)


def _maxtext_backward(saved, cotangent):
    hidden, unembed, targets, weights = saved

    def add(total, chunk):
        _, pull = jax.vjp(lambda h, w: _maxtext_chunk(h, w, *chunk[1:]), chunk[0], unembed)
        d_hidden, d_unembed = pull(cotangent)
        return total + d_unembed.astype(jnp.float32), d_hidden

    zero = jnp.zeros(unembed.shape, jnp.float32)
    d_unembed, d_hidden = jax.lax.scan(add, zero, _maxtext_chunks(hidden, targets, weights))
    return d_hidden.reshape(hidden.shape), d_unembed.astype(unembed.dtype), None, None


maxtext_tiling.defvjp(_maxtext_forward, _maxtext_backward)


def tokamax_path(implementation):
    """tokamax's layer by name; its per-token losses, weighted outside."""
    import tokamax

    def objective(hidden, unembed, targets, weights):
        losses = tokamax.linear_softmax_cross_entropy_loss(
            hidden, targets, unembed.astype(hidden.dtype), reduction="none", implementation=implementation
        )
        return jnp.sum(weights * losses)

    return objective


@functools.cache
def peers(with_kernels=()):
    """Peers by name; tokamax's where it is installed."""
    found = {"plain_jax": plain_jax, "optax": optax_integer_labels, "maxtext_tiling": maxtext_tiling}
    try:
        for name in ("xla", "chunked_xla", *with_kernels):
            found[f"tokamax_{name}"] = tokamax_path(name)
    except ImportError:
        print("tokamax is not installed (it needs Python 3.12): measured without it")
    return found


def _logits(hidden, unembed):
    return jnp.einsum("td,dv->tv", hidden, unembed.astype(hidden.dtype), preferred_element_type=jnp.float32)


# Three matrix products of the same shapes, each its own program: logits, gradient of hidden, of unembed.
logits_product = jax.jit(_logits)
hidden_product = jax.jit(lambda slopes, unembed: jnp.einsum("tv,dv->td", slopes, unembed))
unembed_product = jax.jit(lambda hidden, slopes: jnp.einsum("td,tv->dv", hidden, slopes))


def three_products(hidden, unembed):
    slopes = logits_product(hidden, unembed)
    return hidden_product(slopes, unembed), unembed_product(hidden, slopes)
