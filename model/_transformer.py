"""The model: embedding, layers (alike ones stacked and scanned), final norm, MTP blocks, head."""

import functools
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from ._axes import Axes, constrain
from ._block import Block, BlockFacts, init_block
from ._config import ModelConfig, Remat
from ._constants import LayerConstants, stacked_constants
from ._layer_plan import AlikeLayers, LayerPlan
from ._linear import init_normal
from ._mtp import MtpBlock, init_mtp_block, tokens_ahead
from ._norm import rms_norm
from ._output import ModelOutput, stack_facts, without_details
from ._parallel import Parallel
from ._parallel_positions import with_following
from ._parallel_weights import keep_cut, looked_up, whole_field
from ._param import param
from ._quantized import with_quantization
from ._rows import Rows, make_rows
from ._stack import in_layer_order, run_layers


class Transformer(eqx.Module):
    """A decoder-only language model. It returns hidden states and facts, and knows no loss.

    Attributes:
        embed: Token embeddings.
        layers: A block for each kind of layers (`config.stack`); the arrays of a kind of several layers have the layers
            as first axis.
        final_norm: Scale of the norm after the last layer.
        head: Output head; None when it is the transposed embedding.
        mtp: One block per depth.
        config: What was built.
    """

    embed: Float[Array, "V D"] = eqx.field(metadata=param("embedding"))
    layers: tuple[Block, ...]
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
        x, facts, hidden_states = self._layers(self.embed_tokens(tokens, axes, parallel), rows, keep)
        hidden = rms_norm(x, self.final_norm, self.config.rms_norm_eps)
        mtp_hidden, mtp_facts = self._mtp_depths(hidden, tokens, rows, keep)
        router, max_logits = stack_facts(facts, self.config.stack, mtp_facts)
        return ModelOutput(
            hidden=hidden,
            mtp_hidden=mtp_hidden,
            router=router,
            max_logits=max_logits,
            hidden_states=hidden_states,
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

    def _layers(
        self, x: Float[Array, "B S D"], rows: Rows, keep: "_Keep"
    ) -> tuple[Float[Array, "B S D"], list[BlockFacts], Float[Array, "L B S D"] | None]:
        """The residual stream after the last layer, the facts of each kind, and the stream before every layer."""
        config, stack = self.config, self.config.stack

        def layer(
            x: Array, rows: Rows, given: tuple[Block, LayerConstants], is_scanned: bool = True
        ) -> tuple[Array, tuple]:
            block, constants = given
            call = with_quantization(Block.__call__, config.quantization)
            run = _checkpoint_policy(config.remat, rows.parallel, is_scanned)(call)
            y, facts = run(block, x, rows, constants)
            return y, (keep(facts), x if keep.hidden_states else None)

        inputs = [(b, stacked_constants(config, a)) for b, a in zip(self.layers, stack.alike, strict=True)]
        alone = functools.partial(layer, is_scanned=False)
        x, outputs = run_layers(layer, x, rows, inputs, stack, alone=alone)
        return x, [facts for facts, _ in outputs], in_layer_order([states for _, states in outputs], stack)

    def _mtp_depths(
        self, hidden: Float[Array, "B S D"], tokens: Int[Array, "B S"], rows: Rows, keep: "_Keep"
    ) -> tuple[Float[Array, "M B S D"], list[BlockFacts]]:
        checkpointed = _checkpoint_policy(self.config.remat, rows.parallel, is_scanned=False)
        call = with_quantization(MtpBlock.__call__, self.config.quantization)
        outputs, facts = [], []
        for depth, block in enumerate(self.mtp, start=1):
            ahead = tokens_ahead(
                with_following(tokens, depth, rows.parallel),
                with_following(rows.segment_ids, depth, rows.parallel),
                depth,
            )[:, : tokens.shape[1]]
            embedded = self.embed_tokens(ahead, rows.axes, rows.parallel)
            hidden, fact = checkpointed(call)(block, embedded, hidden, rows)
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


def _checkpoint_policy(
    remat: Remat, parallel: Parallel | None, is_scanned: bool
) -> Callable[[Callable], Callable]:
    """`jax.checkpoint` with the policy of `remat`, or nothing. Gathered weights are never kept.

    Under a scan the two passes are two loops, which the compiler does not join: no barrier is needed, which would make
    every weight and residual of a layer be copied out of the stack before it is used.
    """
    policies = jax.checkpoint_policies
    match remat:
        case "none":
            return (lambda f: f) if parallel is None else lambda f: jax.checkpoint(f, policy=keep_cut)
        case "dots":
            return lambda f: jax.checkpoint(f, policy=policies.dots_with_no_batch_dims_saveable)
        case "block":
            return lambda f: jax.checkpoint(f, prevent_cse=not is_scanned)
        case "offload":
            policy = policies.offload_dot_with_no_batch_dims("device", "pinned_host")
            return lambda f: jax.checkpoint(f, policy=policy)


def init_model(config: ModelConfig, *, key: PRNGKeyArray) -> Transformer:
    """A model with float32 arrays: normal weights of standard deviation `initializer_range`, norm scales 1."""
    embed_key, head_key, layer_key, mtp_key = jax.random.split(key, 4)
    width, std, stack = config.hidden_size, config.initializer_range, config.stack
    layer_keys = jax.random.split(layer_key, config.num_layers)

    def stacked(alike: AlikeLayers) -> Block:
        make = functools.partial(_init_layer, config, alike.kind)
        for _ in alike.stack_shape:
            make = eqx.filter_vmap(make)
        return make(layer_keys[np.reshape(alike.layers, alike.stack_shape)])

    mtp_keys = jax.random.split(mtp_key, max(config.num_mtp_layers, 1))
    head = None if config.tie_word_embeddings else init_normal((width, config.vocab_size), std, key=head_key)
    return Transformer(
        embed=init_normal((config.vocab_size, width), std, key=embed_key),
        layers=tuple(stacked(alike) for alike in stack.alike),
        final_norm=jnp.ones(width, dtype=jnp.float32),
        head=head,
        mtp=tuple(init_mtp_block(config, key=mtp_keys[k]) for k in range(config.num_mtp_layers)),
        config=config,
    )


def _init_layer(config: ModelConfig, kind: LayerPlan, key: PRNGKeyArray) -> Block:
    """`init_block` with a key that can be mapped over."""
    return init_block(config, kind, key=key)
