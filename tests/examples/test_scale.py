"""`scale_for`: for every framework's reductions the reduced gradient is the global one."""

import numpy as np
import pytest

from eqx_loss import Reductions, scale_for

RANKS, CONTEXT, STEPS = 3, 2, 4
PRESETS = {
    "torch_ddp": Reductions.torch_ddp(ranks=RANKS * CONTEXT, micro_steps=STEPS),
    "optax_multi_steps": Reductions.optax_multi_steps(micro_steps=STEPS),
    "jax_pmean": Reductions.jax_pmean(ranks=RANKS * CONTEXT, micro_steps=STEPS),
    "hf_trainer": Reductions.hf_trainer(ranks=RANKS * CONTEXT, micro_steps=STEPS),
    "torchtitan": Reductions.torchtitan(ranks=RANKS * CONTEXT, micro_steps=STEPS),
    "megatron_micro_batch": Reductions.megatron(
        calculate_per_token_loss=False, data_ranks=RANKS, context_ranks=CONTEXT, micro_steps=STEPS
    ),
    "megatron_token": Reductions.megatron(
        calculate_per_token_loss=True, data_ranks=RANKS, context_ranks=CONTEXT, micro_steps=STEPS
    ),
    "mean_everywhere": Reductions(
        data_ranks=RANKS, over_data="mean", context_ranks=CONTEXT, over_context="mean", micro_steps=STEPS,
        over_micro_steps="mean",
    ),
}  # fmt: skip


def local_gradients(seed):
    """Per-token gradients of a scalar parameter and masks, `[steps, ranks, context, tokens]`."""
    rng = np.random.default_rng(seed)
    mask = rng.integers(0, 2, (STEPS, RANKS, CONTEXT, 5)).astype(float)
    mask[1, 0] = 0  # a rank without tokens
    return rng.standard_normal(mask.shape), mask


def reduce(gradients, reductions, num_tokens):
    """What the framework does, written out: one reduction per axis, then its own division."""
    reducers = {"sum": np.sum, "mean": np.mean}
    over = reducers[reductions.over_micro_steps] if reductions.micro_steps > 1 else np.sum
    gradients = over(gradients, axis=0)
    if reductions.data_ranks == RANKS:
        gradients = reducers[reductions.over_data](gradients, axis=0)
        gradients = reducers[reductions.over_context](gradients, axis=0)
    else:  # ranks and context shards are one axis, or one global array
        gradients = (reducers[reductions.over_data] if reductions.data_ranks > 1 else np.sum)(gradients)
    return gradients / num_tokens if reductions.divides_by_tokens else gradients


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("local_loss", ["weighted_sum", "token_sum", "token_mean"])
def test_reduced_gradient_is_the_global_one(name, local_loss):
    reductions = PRESETS[name]
    values, mask = local_gradients(7)
    num_tokens = mask.sum()
    weights = (
        np.random.default_rng(8).random(mask.shape) if local_loss == "weighted_sum" else mask / num_tokens
    )
    counts = mask.sum(-1)
    local = ((weights if local_loss == "weighted_sum" else mask) * values).sum(-1)
    if local_loss == "token_mean":
        local = local / np.maximum(counts, 1)
    factors = np.vectorize(
        lambda count: scale_for(
            reductions, local_loss, num_tokens=float(num_tokens), local_num_tokens=float(count)
        )
    )(counts)
    reduced = reduce(factors * local, reductions, num_tokens)
    np.testing.assert_allclose(reduced, (weights * values).sum(), rtol=1e-12)


@pytest.mark.parametrize("name", PRESETS)
def test_factor_one_is_wrong_wherever_an_average_is_taken(name):
    reductions = PRESETS[name]
    factor = scale_for(reductions, num_tokens=17)
    assert (factor == 1) == (reductions.divisor == 1 and not reductions.divides_by_tokens)


def test_a_step_without_tokens_has_a_finite_factor():
    ddp = PRESETS["torch_ddp"]
    assert scale_for(ddp, "token_sum", num_tokens=0) == 0
    assert scale_for(ddp, "token_mean", num_tokens=0, local_num_tokens=0) == 0
    assert scale_for(PRESETS["megatron_token"], "token_sum") == 1


def test_missing_counts_and_bad_values_say_what_is_needed():
    with pytest.raises(ValueError, match="num_tokens must be a count"):
        scale_for(Reductions(), "token_sum")
    with pytest.raises(ValueError, match="local_num_tokens must be a count"):
        scale_for(Reductions(), "token_mean", num_tokens=3)
    with pytest.raises(ValueError, match="num_tokens must be a count"):
        scale_for(Reductions(divides_by_tokens=True))
    with pytest.raises(ValueError, match="data_ranks must be at least 1"):
        Reductions(data_ranks=0)
