"""Multi-token prediction: one block per depth on the hidden state before it and a token further ahead."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from ._block import Block, BlockFacts, init_block
from ._config import ModelConfig
from ._linear import init_normal, project
from ._norm import rms_norm
from ._parallel_weights import whole_field
from ._param import matrix, param
from ._rows import Rows


class MtpBlock(eqx.Module):
    """`h_k = norm(block(concat(norm(embedding), norm(h_{k-1})) @ merge))`.

    DeepSeek-V3, arXiv:2412.19437, eq. 21 and 22, with the embedding first in the concatenation, as the released
    `bailing_moe_v3` code has it.
    """

    embedding_norm: Float[Array, " D"] = eqx.field(metadata=param("norm"))
    hidden_norm: Float[Array, " D"] = eqx.field(metadata=param("norm"))
    merge: Float[Array, "D2 D"] = eqx.field(metadata=matrix("D2", "D"))
    block: Block
    final_norm: Float[Array, " D"] = eqx.field(metadata=param("norm"))
    norm_eps: float = eqx.field(static=True)

    def __call__(
        self, embedded: Float[Array, "B S D"], hidden: Float[Array, "B S D"], rows: Rows
    ) -> tuple[Float[Array, "B S D"], BlockFacts]:
        """Hidden state of this depth after its own final norm, and the block's facts.

        Args:
            embedded: Embeddings of the tokens k ahead.
            hidden: Hidden state of the depth before; of the main stack, after its final norm, for k = 1.
            rows: The rows as they are: nothing is rolled.
        """
        embedded = rms_norm(embedded, self.embedding_norm, self.norm_eps)
        hidden = rms_norm(hidden, self.hidden_norm, self.norm_eps)
        merge = whole_field(self, "merge", rows.parallel)
        x = project("bse,ed->bsd", jnp.concatenate([embedded, hidden], axis=-1), merge)
        x, facts = self.block(x, rows)
        return rms_norm(x, self.final_norm, self.norm_eps), facts


def tokens_ahead(tokens: Int[Array, "B S"], segment_ids: Int[Array, "B S"], depth: int) -> Int[Array, "B S"]:
    """The token `depth` positions ahead in the same document; 0 where there is none, and at padding."""
    length = tokens.shape[1]
    ahead = min(depth, length)
    later = jnp.pad(tokens[:, ahead:], ((0, 0), (0, ahead)))
    same = jnp.pad(segment_ids[:, ahead:], ((0, 0), (0, ahead))) == segment_ids
    return jnp.where(same & (segment_ids != 0), later, 0)


def init_mtp_block(config: ModelConfig, *, key: PRNGKeyArray) -> MtpBlock:
    """Normal merge weights; norm scales 1."""
    merge_key, block_key = jax.random.split(key)
    width = config.hidden_size
    ones = jnp.ones(width, dtype=jnp.float32)
    return MtpBlock(
        embedding_norm=ones,
        hidden_norm=ones,
        merge=init_normal((2 * width, width), config.initializer_range, key=merge_key),
        block=init_block(config, config.mtp_plan, key=block_key),
        final_norm=ones,
        norm_eps=config.rms_norm_eps,
    )
