"""QK-clip in the step: on the new weights, by the largest logit of all micro-steps."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_loss import LossSemantics
from model import qk_clip
from train._state import TrainState, make_optimizer
from train._step import make_train_step

from .step_cases import COMPILER_OPTIONS, OPTIMIZER, mesh_of, packed_batch, tiny_config, tiny_model

RTOL = 1e-6  # float32: one product; another program may round the update otherwise
SEMANTICS = LossSemantics(calculate_per_token_loss=False)


@pytest.mark.slow
def test_step_clips_the_new_weights_by_the_largest_logit_of_all_micro_steps():
    config = tiny_config(num_layers=1, first_k_dense_replace=0, moe=None, mtp=None, record_max_logits=True)
    model, batch, zero = tiny_model(config), packed_batch(), jnp.zeros((), jnp.int32)

    def stepped(threshold):
        optimizer = make_optimizer(dataclasses.replace(OPTIMIZER, qk_clip_threshold=threshold), config)
        state = TrainState(model=model, optimizer=optimizer.init(model), step=zero, num_skipped=zero)
        step = make_train_step(config, SEMANTICS, optimizer, mesh_of(), gradient_accumulation_steps=2)
        return jax.jit(step).lower(batch, state).compile(compiler_options=COMPILER_OPTIONS)(batch, state)

    plain, output = stepped(None)
    half = batch.tokens.shape[0] // 2
    halves = [
        model(batch.tokens[rows], segment_ids=batch.segment_ids[rows], positions=batch.positions[rows])
        for rows in (slice(None, half), slice(half, None))
    ]
    tops = np.stack([np.asarray(part.max_logits) for part in halves])
    np.testing.assert_allclose(output.max_logits, tops.max(axis=0), rtol=1e-4)  # float32 logits
    assert (tops.argmax(axis=0) != tops.argmax(axis=0)[0, 0]).any()  # neither micro-step holds all of them

    threshold = float(np.median(output.max_logits))  # some heads are clipped, some are not
    clipped, _ = stepped(threshold)
    want = qk_clip(plain.model, output.max_logits, threshold)
    for ours, theirs in zip(jax.tree.leaves(clipped.model), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=RTOL, atol=RTOL * float(jnp.abs(theirs).max()))
    before, after = (m.layers[0].mixer.query.rope for m in (plain.model, clipped.model))
    assert 0 < np.mean(np.asarray(before) != np.asarray(after)) < 1
