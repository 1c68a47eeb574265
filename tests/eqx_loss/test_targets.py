"""Target shifts: document edges, row ends, depths."""

import jax.numpy as jnp
import numpy as np
import pytest

import eqx_loss
from tests.oracles import weights as oracle


def _rows(seed):
    rng = np.random.default_rng(seed)
    targets = rng.integers(1, 99, (3, 9))
    segment_ids = np.cumsum(rng.random((3, 9)) < 0.35, axis=1) + 1
    segment_ids[1, 6:] = 0
    return targets, rng.random((3, 9)) < 0.8, segment_ids


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("depth", [0, 1, 2, 4, 9])
def test_shift_equals_the_looped_oracle(depth, across):
    for seed in range(4):
        targets, mask, segment_ids = _rows(seed)
        found, found_mask = eqx_loss.shift_targets(
            jnp.asarray(targets),
            jnp.asarray(mask),
            depth=depth,
            segment_ids=jnp.asarray(segment_ids),
            roll_across_documents=across,
        )
        assert np.array_equal(found, oracle.shifted(targets, segment_ids, depth, across))
        assert np.array_equal(found_mask, oracle.shifted(mask, segment_ids, depth, across))


def test_mask_is_that_of_the_target_and_not_of_the_positions_between():
    mask = jnp.array([[True, False, True, True]])
    _, shifted = eqx_loss.shift_targets(jnp.arange(4)[None], mask, depth=2, segment_ids=None)
    assert shifted.tolist() == [[True, True, False, False]]


def test_shift_does_not_jump_over_a_document_to_a_reused_id():
    segment_ids = jnp.array([[1, 2, 1, 1]])
    _, shifted = eqx_loss.shift_targets(
        jnp.arange(4)[None], jnp.ones((1, 4), bool), depth=2, segment_ids=segment_ids
    )
    assert not shifted.any()


def test_last_token_of_a_document_and_a_one_token_document_have_no_target():
    tokens = jnp.array([[5, 2, 7, 1, 6, 3, 4, 2, 0, 0]])
    segment_ids = jnp.array([[1, 1, 1, 1, 2, 2, 2, 3, 0, 0]])
    targets, mask = eqx_loss.next_token_targets(tokens, segment_ids)
    assert mask.tolist() == [[True, True, True, False, True, True, False, False, False, False]]
    assert targets[0, :3].tolist() == [2, 7, 1]


def test_negative_depth_is_refused():
    with pytest.raises(ValueError, match="depth must be >= 0"):
        eqx_loss.shift_targets(jnp.ones((1, 2), int), jnp.ones((1, 2), bool), depth=-1, segment_ids=None)
