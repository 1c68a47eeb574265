"""The Pallas splash attention kernel of TPUs, for packed causal rows."""

import typing

import jax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.experimental.pallas.ops.tpu.splash_attention import (
    BlockSizes,
    CausalMask,
    MultiHeadMask,
    SegmentIds,
    make_splash_mha,
)
from jaxtyping import Array, Float, Int

from ._axes import Axes

_BLOCK_SIZES = (512, 256, 128)


def splash_supports(length: int) -> bool:
    """Whether the kernel takes rows of `length` positions: whole lanes of 128."""
    return length % 128 == 0


def splash_attention(
    q: Float[Array, "B S H K"],
    k: Float[Array, "B S J K"],
    v: Float[Array, "B S J U"],
    segment_ids: Int[Array, "B S"],
    axes: Axes | None = None,
    interpret: bool = False,
) -> Float[Array, "B S H U"]:
    """What `blockwise_attention` returns first, by the TPU kernel; `q` is scaled already.

    With `axes`, rows and heads stay where they are and every device sees whole rows.

    Args:
        q: Scaled queries.
        k: Keys.
        v: Values.
        segment_ids: Document ids.
        axes: Mesh to run on; the kernel cannot be partitioned by the compiler.
        interpret: Run the kernel in the interpreter, on any platform.
    """

    def local(q, k, v, segment_ids):
        length, num_heads = q.shape[1], q.shape[2]
        kernel = make_splash_mha(
            MultiHeadMask([CausalMask((length, length))] * num_heads),
            block_sizes=_block_sizes(length),
            head_shards=1,
            q_seq_shards=1,
            interpret=interpret,
        )
        q, k, v = (_heads_first(x, interpret).transpose(0, 2, 1, 3) for x in (q, k, v))
        out = jax.vmap(lambda q, k, v, ids: kernel(q, k, v, SegmentIds(q=ids, kv=ids)))(q, k, v, segment_ids)
        return typing.cast(Array, out).transpose(0, 2, 1, 3)

    if axes is None:
        return local(q, k, v, segment_ids)
    heads = axes.spec("B _ H _")  # "_" is in no table: whole rows
    kv_heads = axes.spec("B _ J _") if k.shape[2] != q.shape[2] else heads
    mapped = jax.shard_map(
        local,
        mesh=axes.mesh,
        in_specs=(heads, kv_heads, kv_heads, axes.spec("B _")),
        out_specs=heads,
        check_vma=False,  # the kernel does not say how its outputs vary over the mesh
    )
    return mapped(q, k, v, segment_ids)


def _heads_first(x: Float[Array, "B S H K"], interpret: bool) -> Float[Array, "B S H K"]:
    """`x`, and its slope, laid out as the kernel has them: else the slope is copied before it is used."""
    return x if interpret else with_layout_constraint(x, Layout(major_to_minor=(0, 2, 1, 3)))


def _block_sizes(length: int) -> BlockSizes:
    """The largest known-good tile that divides the row."""
    size = next(block for block in _BLOCK_SIZES if length % block == 0)
    return BlockSizes(
        block_q=size,
        block_kv=size,
        block_kv_compute=size,
        block_q_dkv=size,
        block_kv_dkv=size,
        block_kv_dkv_compute=size,
        block_q_dq=size,
        block_kv_dq=size,
    )
