"""Grouped products, experts and router against loops in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model import MoeConfig
from model._grouped import blocked_matmul, grouped_matmul, ragged_matmul
from model._moe import Experts, run_experts
from model._router import Router, router_facts
from tests.oracles.experts import run_experts as run_experts_slowly
from tests.oracles.router import route

SIZES = [
    pytest.param([5, 0, 17, 2], id="uneven"),
    pytest.param([0, 0, 0, 24], id="one-group"),
    pytest.param([8, 8, 8, 0], id="whole-blocks"),
    pytest.param([1, 0, 0, 0], id="one-row"),
]


@pytest.mark.parametrize("sizes", SIZES)
def test_grouped_products_equal_a_loop_over_groups(sizes, x64):
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(sum(sizes), 6)), rng.normal(size=(4, 6, 5))
    starts = np.cumsum([0, *sizes])
    expected = np.concatenate([x[a:b] @ w for a, b, w in zip(starts, starts[1:], weight)])
    arguments = (jnp.asarray(x), jnp.asarray(weight), jnp.array(sizes))
    for product in (grouped_matmul, blocked_matmul, ragged_matmul):
        np.testing.assert_allclose(product(*arguments), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sizes", SIZES)
def test_gradients_of_blocks_equal_those_of_ragged_dot(sizes, x64):
    rng = np.random.default_rng(1)
    x, weight = jnp.asarray(rng.normal(size=(sum(sizes), 6))), jnp.asarray(rng.normal(size=(4, 6, 5)))
    probe = rng.normal(size=(sum(sizes), 5))

    def pull(product):
        return jax.grad(lambda x, w: jnp.sum(probe * product(x, w, jnp.array(sizes))), (0, 1))(x, weight)

    for ours, theirs in zip(pull(grouped_matmul), pull(ragged_matmul), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-12)


def test_lowering_for_a_tpu_takes_ragged_dot_and_for_a_cpu_does_not():
    shapes = [
        jax.ShapeDtypeStruct(s, t) for s, t in (((64, 8), "float32"), ((4, 8, 8), "float32"), ((4,), "int32"))
    ]
    traced = jax.jit(grouped_matmul).trace(*shapes)
    assert "ragged_dot" in traced.lower(lowering_platforms=("tpu",)).as_text()
    assert "ragged_dot" not in traced.lower(lowering_platforms=("cpu",)).as_text()


@pytest.mark.parametrize("limit", [None, 0.3])
def test_experts_equal_the_oracle(limit, x64):
    rng = np.random.default_rng(2)
    gate, up = rng.normal(size=(2, 5, 6, 4))
    down = rng.normal(size=(5, 4, 6))
    tokens, weights = rng.normal(size=(23, 6)), rng.uniform(size=(23, 3))
    chosen = np.stack([rng.permutation(5)[:3] for _ in range(23)])
    experts = Experts(gate=jnp.asarray(gate), up=jnp.asarray(up), down=jnp.asarray(down))
    bound = None if limit is None else jnp.asarray(limit)
    ours, _ = run_experts(experts, jnp.asarray(tokens), jnp.asarray(chosen), jnp.asarray(weights), bound)
    expected = run_experts_slowly(gate, up, down, tokens, chosen, weights, limit or np.inf)
    np.testing.assert_allclose(ours, expected, rtol=1e-11, atol=1e-12)


def test_experts_gradient_equals_a_dense_sum_over_experts(x64):
    rng = np.random.default_rng(3)
    experts = Experts(
        gate=jnp.asarray(rng.normal(size=(5, 6, 4))),
        up=jnp.asarray(rng.normal(size=(5, 6, 4))),
        down=jnp.asarray(rng.normal(size=(5, 4, 6))),
    )
    tokens, weights = jnp.asarray(rng.normal(size=(11, 6))), jnp.asarray(rng.uniform(size=(11, 2)))
    chosen = jnp.asarray(np.stack([rng.permutation(5)[:2] for _ in range(11)]))
    probe = rng.normal(size=(11, 6))

    def dense(experts, tokens, weights):
        all_experts = jnp.einsum("td,edf->etf", tokens, experts.gate)
        hidden = jax.nn.silu(all_experts) * jnp.einsum("td,edf->etf", tokens, experts.up)
        share = jnp.sum(weights[..., None] * jax.nn.one_hot(chosen, 5), axis=1)
        return jnp.sum(probe * jnp.einsum("etf,efd,te->td", hidden, experts.down, share))

    def grouped(experts, tokens, weights):
        return jnp.sum(probe * run_experts(experts, tokens, chosen, weights)[0])

    ours, theirs = (jax.grad(f, (0, 1, 2))(experts, tokens, weights) for f in (grouped, dense))
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-11)


CONFIG = MoeConfig(
    num_experts=12,
    num_experts_per_tok=3,
    moe_intermediate_size=4,
    num_routing_groups=4,
    topk_routing_group=2,
    routed_scaling_factor=2.5,
)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm_topk_prob": False},
        {"topk_routing_group": 4},
        {"num_routing_groups": 1, "topk_routing_group": 1},
        {"num_routing_groups": 12, "topk_routing_group": 5},
        {"score_function": "softmax"},
    ],
)
def test_router_equals_the_oracle(changes, x64):
    config = dataclasses.replace(CONFIG, **changes)
    rng = np.random.default_rng(4)
    x, weight, bias = rng.normal(size=(2, 9, 6)), rng.normal(size=(6, 12)), 0.3 * rng.normal(size=12)
    router = Router(weight=jnp.asarray(weight), router_bias=jnp.asarray(bias), config=config)
    routing = router(jnp.asarray(x))
    experts, weights = route(
        (x @ weight).reshape(18, 12),
        bias,
        num_groups=config.num_routing_groups,
        kept_groups=config.topk_routing_group,
        num_chosen=3,
        normalize=config.norm_topk_prob,
        scale=config.routed_scaling_factor,
        softmax=config.score_function == "softmax",
    )
    order = np.argsort(routing.experts, axis=-1)
    np.testing.assert_array_equal(
        np.take_along_axis(np.asarray(routing.experts), order, -1).reshape(18, 3), experts
    )
    ours = np.take_along_axis(np.asarray(routing.weights), order, -1).reshape(18, 3)
    np.testing.assert_allclose(ours, weights, rtol=1e-12)


def test_router_scores_bfloat16_tokens_in_float32():
    """Two experts whose logits differ by less than a bfloat16 step: the better one is chosen."""
    weight = jnp.zeros((4, 12)).at[0, 3].set(1.0).at[0, 7].set(1.0 + 2**-12)
    config = dataclasses.replace(CONFIG, num_experts_per_tok=1, num_routing_groups=1, topk_routing_group=1)
    routing = Router(weight=weight, router_bias=None, config=config)(jnp.ones((1, 1, 4), jnp.bfloat16))
    assert routing.experts.item() == 7
    assert routing.logits.dtype == jnp.float32


def test_router_sums_count_only_the_masked_positions(x64):
    rng = np.random.default_rng(5)
    x, weight = rng.normal(size=(2, 9, 6)), rng.normal(size=(6, 12))
    mask = rng.uniform(size=(2, 9)) < 0.6
    routing = Router(weight=jnp.asarray(weight), router_bias=None, config=CONFIG)(jnp.asarray(x))
    facts = router_facts(routing, jnp.asarray(mask))
    scores = 1 / (1 + np.exp(-(x @ weight)))
    shares = scores / scores.sum(-1, keepdims=True)
    for b in range(2):
        expected = np.bincount(np.asarray(routing.experts)[b][mask[b]].ravel(), minlength=12)
        np.testing.assert_array_equal(facts.counts[b], expected)
        np.testing.assert_allclose(facts.score_sums[b], shares[b][mask[b]].sum(0), rtol=1e-12)
    np.testing.assert_allclose(facts.logsumexp, np.log(np.exp(x @ weight).sum(-1)), rtol=1e-12)
