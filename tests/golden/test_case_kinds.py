"""More cases of the known kinds, with values from NumPy loops, so that solvers do not fit the given files alone."""

import json
import math

import numpy as np
import pytest

from tests.golden import cases

RNG = np.random.default_rng(3)
XENT = RNG.uniform(1, 5, (5, 6))
MASK = RNG.integers(0, 2, (5, 6))
MASK[2] = 0
SCALE = RNG.uniform(0.2, 2, (5, 6))
SEGMENTS = np.array([[1, 1, 2, 2, 2, 0]] * 5)
ROUTER = RNG.normal(size=(2, 4, 3))
PADDING = np.array([[0, 0, 0, 1], [0, 1, 1, 1]])
LOGITS = RNG.normal(size=(4, 6))
DEPTHS = RNG.uniform(1, 4, (3, 6))
ROW = np.array([1, 1, 0, 1, 1, 1])


def mean(values, weights):
    """Weighted mean; 0 without weight."""
    return float((values * weights).sum() / weights.sum()) if weights.sum() else 0.0


def row_means(weights):
    return [mean(XENT[b], weights[b]) for b in range(5)]


def document_means():
    return [mean(XENT[b], MASK[b] * (SEGMENTS[b] == d)) for b in range(5) for d in (1, 2)]


def balance(kept):
    """`E sum f P` of the router positions that are kept."""
    scores = np.exp(ROUTER) / np.exp(ROUTER).sum(-1, keepdims=True)
    sent = np.eye(3)[ROUTER.argmax(-1)]
    return float(3 * (sent[kept].mean(0) * scores[kept].mean(0)).sum())


def shifted(depth):
    return np.append(ROW[depth:], np.zeros(depth))


def smoothed():
    """Cross-entropy with label smoothing 0.1 over the first 5 of 6 columns; target 2 is ignored."""
    real = LOGITS[:, :5]
    norm = np.log(np.exp(real).sum(-1))
    picked = [norm[i] - 0.9 * real[i, t] - 0.1 * real[i].mean() for i, t in ((0, 0), (1, 1), (3, 3))]
    return [*picked[:2], 0.0, picked[2]]


PER_TOKEN = {"per_token_xent": XENT.tolist(), "loss_mask": MASK.tolist()}
FRACTIONS = {**PER_TOKEN, "token_weight": SCALE.tolist()}
ROUTED = {"router_logits": ROUTER.tolist(), "config": {"top_k": 1}}
EVERYWHERE = np.ones((2, 4), bool)
DEPTH_MEANS = [mean(DEPTHS[k], shifted(k + 1)) for k in range(3)]
CASES = {
    "rows": (
        "zero_token",
        {**PER_TOKEN, "config": {"objective": "sample_mean"}},
        {"loss": np.mean(row_means(MASK)), "n_tokens": int(MASK.sum())},
    ),
    "rows without empty": (
        "zero_token",
        {**PER_TOKEN, "config": {"objective": "sample_mean", "count_empty": False}},
        {"loss": sum(row_means(MASK)) / sum(MASK.any(1))},
    ),
    "five micro-batches": (
        "gradient_accumulation",
        {**PER_TOKEN, "config": {"objective": "microbatch_mean", "micro_batch_size": 1}},
        {"loss": np.mean(row_means(MASK)), "token_mean": mean(XENT, MASK)},
    ),
    "documents": (
        "packing",
        {
            "per_token_xent": XENT.tolist(),
            "loss_mask": (MASK * (SEGMENTS > 0)).tolist(),
            "segment_ids": SEGMENTS.tolist(),
            "config": {"objective": "document_mean"},
        },
        {"loss": np.mean(document_means())},
    ),
    "fractions": (
        "weighting",
        FRACTIONS,
        {
            "loss": mean(XENT, SCALE * MASK),
            "divide_by_count_of_weighted_tokens": (SCALE * MASK * XENT).sum() / MASK.sum(),
        },
    ),
    "fractions in rows": (
        "weighting",
        {**FRACTIONS, "config": {"objective": "sample_mean"}},
        {"loss": np.mean(row_means(SCALE * MASK))},
    ),
    "ranks that add": (
        "data_parallel",
        {"per_token_xent_by_rank": [[1.0, 2.0], [3.0]], "config": {"gradient_all_reduce": "sum over ranks"}},
        {"loss": 2.0, "multiplier_of_local_sum": 1 / 3, "multiplier_of_local_mean": [2 / 3, 1 / 3]},
    ),
    "targets of three depths": (
        "mtp",
        {"tokens": [5, 6, 7, 8, 9, 1], "segment_ids": [1, 1, 1, 2, 2, 2], "config": {"mtp_num_layers": 3}},
        {"n_targets_by_depth": [2.0, 0.0, 0.0], "mtp_targets_1": [7, 0, 0, 1, 0, 0]},
    ),
    "losses of three depths": (
        "mtp",
        {"mtp_per_token_xent_by_depth": DEPTHS.tolist(), "loss_mask": ROW.tolist()},
        {"depth_losses": DEPTH_MEANS, "mean_of_depth_means": np.mean(DEPTH_MEANS)},
    ),
    "scopes": (
        "moe_aux",
        ROUTED,
        {
            "aux": balance(EVERYWHERE),
            "sequence_aux": np.mean([balance((row, slice(None))) for row in (0, 1)]),
        },
    ),
    "router padding": (
        "moe_aux",
        {**ROUTED, "padding_mask": PADDING.tolist()},
        {"aux": balance(PADDING == 0), "n_tokens": 4},
    ),
    "padded vocabulary": (
        "chunked_xent",
        {
            "logits": LOGITS.tolist(),
            "targets": [0, 1, -100, 3],
            "config": {"label_smoothing": 0.1, "vocab_size": 5, "chunk_lengths": [1, 2, 3]},
        },
        {"mean": sum(smoothed()) / 3, "per_token_xent": smoothed()},
    ),
    "z of a whole vocabulary": (
        "vocab_parallel",
        {"logits": LOGITS.tolist(), "targets": [0, 1, 2, 3], "config": {"z_loss_coefficient": 0.01}},
        {"z_loss": 0.01 * np.mean(np.log(np.exp(LOGITS).sum(-1)) ** 2)},
    ),
    "two intervals": (
        "resume",
        {
            "loss_by_step": [1, 2, 3, 4, 5, 6],
            "n_tokens_by_step": [1, 2, 3, 4, 5, 6],
            "config": {"log_interval": 3, "checkpoint_after_step": 4},
        },
        {
            "state_at_step_4": {"xent_sum": 16, "n_tokens": 4, "steps": 1},
            "logged_at_step_3": 14 / 6,
            "logged_at_step_6": 77 / 15,
        },
    ),
    "bytes": (
        "logging",
        {"xent_sum_by_rank": [10.0, 0.0, 7.0], "n_tokens_by_rank": [4, 0, 3], "n_bytes_by_rank": [9, 0, 8]},
        {"bits_per_byte": 1 / math.log(2), "logged": 17 / 7},
    ),
    "means of batches": (
        "logging",
        {"loss_by_batch": [2.0, 3.0], "n_tokens_by_batch": [1, 3]},
        {"loss": 2.75, "perplexity": math.exp(2.75)},
    ),
    "a further term": (
        "aggregation_mode",
        {
            "main_sum_by_rank": [4.0, 0.0],
            "main_n_by_rank": [2, 0],
            "kl_sum_by_rank": [3.0, 1.0],
            "kl_n_by_rank": [2, 2],
            "config": {"kl_weight": 0.5},
        },
        {"main": 2.0, "kl": 1.0, "total": 2.5},
    ),
    "gradients of parts": (
        "pipeline_parallel",
        {
            "summed_gradient_by_microbatch": [[3.0, 0], [0, 4.0]],
            "n_tokens_by_microbatch": [1, 4],
            "config": {"max_grad_norm": 0.5},
        },
        {"gradient": [0.6, 0.8], "grad_norm": 1.0, "clipped": [0.3, 0.4]},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_further_case_of_a_known_kind_has_the_right_values(tmp_path, name):
    kind, inputs, values = CASES[name]
    path = tmp_path / "case.json"
    path.write_text(json.dumps({"kind": kind, "inputs": inputs, "expected": {"values": values}}))
    assert cases.judge(path).problem == ""
