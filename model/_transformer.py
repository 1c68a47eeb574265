"""The model: embedding, layers (a prefix, one scan over alike groups, a suffix), final norm, MTP blocks, head."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from ._axes import Axes, constrain
from ._block import Block, BlockFacts, init_block
from ._config import ModelConfig, Remat
from ._constants import LayerConstants, layer_constants, stacked_constants
from ._linear import init_normal
from ._mtp import MtpBlock, init_mtp_block, tokens_ahead
from ._norm import rms_norm
from ._output import ModelOutput, stack_facts, without_details
from ._parallel import Parallel, keep_cut, looked_up, whole_field
from ._parallel_positions import with_following
from ._param import param
from ._rows import Rows, make_rows


class Transformer(eqx.Module):
    """A decoder-only language model. It returns hidden states and facts, and knows no loss.

    Attributes:
        embed: Token embeddings.
        prefix: Layers before the scanned groups.
        groups: The layers of a group; every array has the groups as its first axis.
        suffix: Layers of an incomplete last group.
        final_norm: Scale of the norm after the last layer.
        head: Output head; None when it is the transposed embedding.
        mtp: One block per depth.
        config: What was built.
    """

    embed: Float[Array, "V D"] = eqx.field(metadata=param("embedding"))
    prefix: tuple[Block, ...]
    groups: tuple[Block, ...]
    suffix: tuple[Block, ...]
    final_norm: Float[Array, " D"] = eqx.field(metadata=param("norm"))
    head: Float[Array, "D V"] | None = eqx.field(metadata=param("head"))
    mtp: tuple[MtpBlock, ...]
    config: ModelConfig = eqx.field(static=True)

    def __call__(
        self,
        tokens: Int[Array, "B S"],
        *,
        segment_ids: Int[Array, "B S"] | None = None,
        positions: Int[Array, "B S"] | None = None,
        router_mask: Bool[Array, "B S"] | None = None,
        return_router_logits: bool = False,
        return_hidden_states: bool = False,
        axes: Axes | None = None,
        parallel: Parallel | None = None,
    ) -> ModelOutput:
        """Hidden states of every position and depth, and what routers and attention say.

        Args:
            tokens: Token ids.
            segment_ids: Packed-document ids, unique within a row; 0 is padding. None: one document a row.
            positions: Position within the document. None: 0, 1, ...
            router_mask: Positions counted in the routers' sums. None: all, padding too.
            return_router_logits: Also return router logits, chosen experts and their weights.
            return_hidden_states: Also return the residual stream.
            axes: Where activations live on a mesh.
            parallel: Inside a `shard_map`: its mesh axes. Parameters and rows are then those of one device.
        """
        rows = make_rows(tokens, segment_ids, positions, router_mask, axes, parallel)
        keep = _Keep(router_details=return_router_logits, hidden_states=return_hidden_states)
        x, stack = self._layers(self.embed_tokens(tokens, axes, parallel), rows, keep)
        hidden = rms_norm(x, self.final_norm, self.config.rms_norm_eps)
        mtp_hidden, mtp_facts = self._mtp_depths(hidden, tokens, rows, keep)
        router, max_logits = stack_facts(stack.before, stack.grouped, [*stack.after, *mtp_facts])
        return ModelOutput(
            hidden=hidden,
            mtp_hidden=mtp_hidden,
            router=router,
            max_logits=max_logits,
            hidden_states=stack.hidden_states,
        )

    @property
    def unembed(self) -> Float[Array, "D V"]:
        """Output head: `logits = hidden @ unembed`."""
        return self.embed.T if self.head is None else self.head

    def whole_unembed(self, parallel: Parallel | None) -> Float[Array, "D V"]:
        """`unembed`, gathered from the devices that hold its cuts."""
        if self.head is None:
            return whole_field(self, "embed", parallel).T
        return whole_field(self, "head", parallel)

    def embed_tokens(
        self, tokens: Int[Array, "B S"], axes: Axes | None = None, parallel: Parallel | None = None
    ) -> Float[Array, "B S D"]:
        """Embeddings in the compute dtype."""
        if parallel is not None:
            return looked_up(self, "embed", tokens, self.config.dtype, parallel)
        return constrain(self.embed[tokens].astype(self.config.dtype), "B S D", axes)

    def _layers(self, x: Float[Array, "B S D"], rows: Rows, keep: "_Keep") -> tuple[Array, "_Stack"]:
        config = self.config
        run = _rematerialize(config.remat, rows.parallel)
        start, size = config.num_prefix_layers, config.layer_group_size
        end = start + config.num_scanned_groups * size
        states: list[Array] = []

        def single(x: Array, blocks: tuple[Block, ...], first: int) -> tuple[Array, list[BlockFacts]]:
            facts = []
            for i, block in enumerate(blocks, start=first):
                states.append(x[None])
                x, fact = run(block, x, rows, layer_constants(config, i))
                facts.append(keep(fact))
            return x, facts

        def group(
            x: Array, inputs: tuple[tuple[Block, ...], tuple[LayerConstants, ...]]
        ) -> tuple[Array, tuple]:
            facts, inside = [], []
            for block, constants in zip(*inputs):
                inside.append(x)
                x, fact = run(block, x, rows, constants)
                facts.append(keep(fact))
            return x, (tuple(facts), jnp.stack(inside) if keep.hidden_states else None)

        x, before = single(x, self.prefix, 0)
        grouped: tuple[BlockFacts, ...] = ()
        if self.groups:
            constants = tuple(stacked_constants(config, range(start + j, end, size)) for j in range(size))
            x, (grouped, inside) = jax.lax.scan(group, x, (self.groups, constants))
            if inside is not None:
                states.append(jnp.reshape(inside, (-1, *x.shape)))
        x, after = single(x, self.suffix, end)
        return x, _Stack(before, grouped, after, jnp.concatenate(states) if keep.hidden_states else None)

    def _mtp_depths(
        self, hidden: Float[Array, "B S D"], tokens: Int[Array, "B S"], rows: Rows, keep: "_Keep"
    ) -> tuple[Float[Array, "M B S D"], list[BlockFacts]]:
        checkpointed = _checkpoint_policy(self.config.remat, rows.parallel)
        outputs, facts = [], []
        for depth, block in enumerate(self.mtp, start=1):
            ahead = tokens_ahead(
                with_following(tokens, depth, rows.parallel),
                with_following(rows.segment_ids, depth, rows.parallel),
                depth,
            )[:, : tokens.shape[1]]
            embedded = self.embed_tokens(ahead, rows.axes, rows.parallel)
            hidden, fact = checkpointed(MtpBlock.__call__)(block, embedded, hidden, rows)
            outputs.append(hidden)
            facts.append(keep(fact))
        stacked = jnp.stack(outputs) if outputs else jnp.zeros((0, *hidden.shape), hidden.dtype)
        return stacked, facts


class _Keep(eqx.Module):
    """What to keep of a layer's facts."""

    router_details: bool = eqx.field(static=True)
    hidden_states: bool = eqx.field(static=True)

    def __call__(self, facts: BlockFacts) -> BlockFacts:
        return facts if self.router_details else without_details(facts)


class _Stack(eqx.Module):
    """Facts of the main layers, the scanned ones apart, and the residual stream."""

    before: list[BlockFacts]
    grouped: tuple[BlockFacts, ...]
    after: list[BlockFacts]
    hidden_states: Float[Array, "L B S D"] | None


def _checkpoint_policy(remat: Remat, parallel: Parallel | None) -> Callable[[Callable], Callable]:
    """`jax.checkpoint` with the policy of `remat`, or nothing. Gathered weights are never kept."""
    policies = jax.checkpoint_policies
    match remat:
        case "none":
            return (lambda f: f) if parallel is None else lambda f: jax.checkpoint(f, policy=keep_cut)
        case "dots":
            return lambda f: jax.checkpoint(f, policy=policies.dots_with_no_batch_dims_saveable)
        case "block":
            return lambda f: jax.checkpoint(f)
        case "offload":
            policy = policies.offload_dot_with_no_batch_dims("device", "pinned_host")
            return lambda f: jax.checkpoint(f, policy=policy)


def _rematerialize(remat: Remat, parallel: Parallel | None) -> Callable:
    """A block's call under the policy of `remat`."""
    return _checkpoint_policy(remat, parallel)(Block.__call__)


def init_model(config: ModelConfig, *, key: PRNGKeyArray) -> Transformer:
    """A model with float32 arrays: normal weights of standard deviation `initializer_range`, norm scales 1."""
    embed_key, head_key, layer_key, mtp_key = jax.random.split(key, 4)
    plan, width, std = config.layer_plan, config.hidden_size, config.initializer_range
    layer_keys = jax.random.split(layer_key, config.num_layers)
    start, size, num_groups = config.num_prefix_layers, config.layer_group_size, config.num_scanned_groups
    end = start + num_groups * size

    def single(first: int, last: int) -> tuple[Block, ...]:
        return tuple(init_block(config, plan[i], key=layer_keys[i]) for i in range(first, last))

    def stacked(j: int) -> Block:
        make = eqx.filter_vmap(lambda key: init_block(config, plan[start + j], key=key))
        return make(layer_keys[start + j : end : size])

    mtp_keys = jax.random.split(mtp_key, max(config.num_mtp_layers, 1))
    head = None if config.tie_word_embeddings else init_normal((width, config.vocab_size), std, key=head_key)
    return Transformer(
        embed=init_normal((config.vocab_size, width), std, key=embed_key),
        prefix=single(0, start),
        groups=tuple(stacked(j) for j in range(size)) if num_groups else (),
        suffix=single(end, config.num_layers),
        final_norm=jnp.ones(width, dtype=jnp.float32),
        head=head,
        mtp=tuple(init_mtp_block(config, key=mtp_keys[k]) for k in range(config.num_mtp_layers)),
        config=config,
    )
