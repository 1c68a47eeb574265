"""A content fingerprint of every array of a state, the same under any sharding."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree, Shaped, UInt32

# Odd multipliers of the murmur3 finalizer (Appleby, MurmurHash3, fmix32).
_MIX1, _MIX2 = np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35)


def leaf_fingerprints(state: PyTree) -> dict[str, tuple[int, int]]:
    """Two 32-bit numbers for every array of `state`, by dotted path.

    The first is the sum of the bit patterns, which any single flipped bit changes; the second the sum of
    a hash of (bit pattern, index), which also sees values that changed places. Both are sums of unsigned
    integers, so neither the mesh nor the order of summation matters. An array without elements gives (0, 0).
    """
    arrays = eqx.filter(state, eqx.is_array)
    paths = leaf_paths(arrays)
    sums = jax.device_get(_fingerprints(jax.tree.leaves(arrays)))
    return {path: (int(pair[0]), int(pair[1])) for path, pair in zip(paths, sums, strict=True)}


def leaf_paths(tree: PyTree) -> list[str]:
    """Dotted path of each leaf, in the order of `jax.tree.leaves`."""
    return [
        jax.tree_util.keystr(path, simple=True, separator=".")
        for path, _ in jax.tree_util.tree_leaves_with_path(tree)
    ]


@jax.jit
def _fingerprints(leaves: list[Shaped[Array, "..."]]) -> list[UInt32[Array, "2"]]:
    return [_fingerprint(leaf) for leaf in leaves]


def _fingerprint(leaf: Shaped[Array, "..."]) -> UInt32[Array, "2"]:
    bits = _bits(leaf)
    index = jnp.zeros((), jnp.uint32)
    for axis, size in enumerate(bits.shape):
        # Per axis rather than over a flat view: a sharded array keeps its sharding.
        index = index * np.uint32(size % 2**32) + jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
    mixed = _mix(bits ^ _mix(index + np.uint32(1)))
    return jnp.stack([jnp.sum(bits, dtype=jnp.uint32), jnp.sum(mixed, dtype=jnp.uint32)])


def _bits(leaf: Shaped[Array, "..."]) -> UInt32[Array, "..."]:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if leaf.dtype == jnp.bool_:
        return leaf.astype(jnp.uint32)
    match leaf.dtype.itemsize:
        case 1:
            return jax.lax.bitcast_convert_type(leaf, jnp.uint8).astype(jnp.uint32)
        case 2:
            return jax.lax.bitcast_convert_type(leaf, jnp.uint16).astype(jnp.uint32)
        case _:
            return jax.lax.bitcast_convert_type(leaf, jnp.uint32)  # wider types gain an axis of words


def _mix(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    x = (x ^ (x >> 16)) * _MIX1
    x = (x ^ (x >> 13)) * _MIX2
    return x ^ (x >> 16)
