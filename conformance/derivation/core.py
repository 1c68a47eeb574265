"""Core tier: the mean of one scored loss over tokens, micro-steps, ranks, rows and documents."""

import numpy as np
from forms import (
    case,
    group_weights,
    integers,
    plain,
    quarters,
    ratio,
    row_group,
    to_bfloat16,
    xent,
    xent_grad,
)

_ALL = "The answer may not depend on how rows are cut into micro-steps and ranks."


def build():
    """All core cases."""
    return [
        *_token_means(),
        *_empty(),
        *_granularities(),
        *_per_token(),
        *_targets(),
    ]


def _batch(seed, lengths, positions, vocab=5):
    """Logits, targets and a mask with the given number of scored tokens per row."""
    shape = (len(lengths), positions)
    mask = (np.arange(positions) < np.asarray(lengths)[:, None]).astype(float)
    return quarters(seed, *shape, vocab), integers(seed + 1, vocab, *shape), mask


def _answers(logits, targets, mask, weights):
    losses = xent(logits, targets, mask)
    return {
        "loss": (weights * losses).sum(),
        "num_tokens": int((mask > 0).sum()),
        "grad_logits": xent_grad(logits, targets, weights),
    }


def _parts(mask, schedule):
    """Boolean arrays: one per (micro-step, rank) of the schedule."""
    return [row_group(mask.shape, rows) for step in schedule for rows in step]


def _with_loss(logits, targets, weights):
    answers = _answers(logits, targets, (weights != 0).astype(float), weights)
    return {key: answers[key] for key in ("loss", "grad_logits")}


def _objective(name, batch, schedule, bugs, *, title, source, explanation, right=None, **extra):
    logits, targets, mask = batch
    weights = mask / max(mask.sum(), 1) if right is None else right
    return case(
        name,
        tier="core",
        task="objective",
        title=title,
        question="Loss of the optimizer step, number of scored tokens, and gradient of the loss by the "
        "logits.",
        inputs={
            "logits": logits, "targets": targets, "loss_mask": mask, "schedule": schedule,
            "granularity": "token", **extra,
        },
        right=_answers(logits, targets, mask, weights),
        bugs={bug: _with_loss(logits, targets, wrong) for bug, wrong in bugs.items()},
        source=source,
        explanation=explanation,
    )  # fmt: skip


def _token_means():
    batch = _batch(11, [4, 3, 1, 2], 4)
    mask = batch[2]
    schedule = [[[0, 1]], [[2, 3]]]
    halves = group_weights(mask, _parts(mask, schedule))
    token = mask / mask.sum()
    ranked = _batch(21, [6, 2, 1, 3], 6)
    ranks = [[[0], [1], [2], [3]]]
    local = group_weights(ranked[2], _parts(ranked[2], ranks))
    per_rank_token = ranked[2] / ranked[2].sum()
    both = _batch(31, [5, 1, 2, 4, 3, 5, 1, 1], 5)
    grid = [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    cells = group_weights(both[2], _parts(both[2], grid))
    # Tokens are summed over the ranks of a micro-step, then averaged over micro-steps.
    steps = group_weights(both[2], [row_group(both[2].shape, rows) for rows in ([0, 1, 2, 3], [4, 5, 6, 7])])
    window = _batch(41, [4, 4], 4)
    window_token = window[2] / window[2].sum()
    return [
        _objective(
            "token_mean", _batch(1, [3, 1], 3), [[[0, 1]]],
            {"divided_by_all_positions": _batch(1, [3, 1], 3)[2] / 6,
             "mask_in_denominator_only": np.ones((2, 3)) / 4},
            title="Mean over scored tokens of one batch",
            source="https://github.com/alibaba/ROLL/pull/444",
            explanation="The mask selects in the numerator and counts in the denominator. Masking one of "
            "them only lets padding or prompts drive the update without any error.",
        ),
        _objective(
            "token_mean_unequal_micro_batches", batch, schedule,
            {"mean_of_micro_batch_means": halves, "sum_of_micro_batch_means": 2 * halves,
             "token_mean_divided_again_by_steps": token / 2, "divided_by_all_positions": mask / mask.size},
            title="Token mean over an accumulation window with unequal token counts",
            source="https://github.com/huggingface/transformers/pull/34191",
            explanation="sum(x1)/n1 + sum(x2)/n2 is not (sum(x1)+sum(x2))/(n1+n2): the denominator is the "
            "window's count. "
            + _ALL,
        ),
        _objective(
            "token_mean_unequal_ranks", ranked, ranks,
            {"mean_of_rank_means": local, "sum_of_rank_means": 4 * local, "loss_times_ranks": 4 * per_rank_token,
             "divided_by_ranks_and_tokens": per_rank_token / 4},
            title="Token mean over data-parallel ranks with unequal token counts",
            source="https://github.com/huggingface/transformers/issues/34242",
            explanation="A mean over ranks of local means is a mean of means. When gradients are averaged "
            "over R ranks, each rank back-propagates its local sum times R / N_total.",
        ),
        _objective(
            "token_mean_steps_and_ranks", both, grid,
            {"mean_over_micro_batches_and_ranks": cells, "mean_over_steps_of_global_means": steps},
            title="Token mean over micro-steps and ranks at once",
            source="https://github.com/NVIDIA/Megatron-LM/issues/936",
            explanation="One global count serves all cells of the grid. " + _ALL,
        ),
        _objective(
            "partial_last_window", window, [[[0]], [[1]]],
            {"divided_by_configured_steps": window_token / 2},
            title="The last, shorter accumulation window divides by what it holds",
            source="https://github.com/huggingface/transformers/pull/39659",
            explanation="Four micro-steps are configured, two are left at the end of the data. Dividing "
            "them by four halves the last step's loss and gradient.",
            configured_steps=4,
        ),
    ]  # fmt: skip


def _empty():
    batch = _batch(51, [3, 2, 0, 4], 4)
    mask = batch[2]
    schedule = [[[0]], [[1]], [[2]], [[3]]]
    clamped = group_weights(mask, _parts(mask, schedule))
    empty_step = _objective(
        "empty_micro_batch", batch, schedule,
        {"local_means_with_clamped_count": clamped, "nanmean_of_local_means": clamped * 4 / 3},
        title="A micro-step (or context shard) without a scored token",
        source="https://github.com/NVIDIA/Megatron-LM/issues/1764",
        explanation="It adds 0 to the sum and 0 to the count; 0/0 is never formed. Clamping its count, or "
        "dropping NaN and averaging the rest, removes the NaN and leaves a wrongly weighted number.",
    )  # fmt: skip
    empty_step["known_bugs"].append({"name": "nan_from_0_over_0", "values": {"loss": "nan"}})
    nothing = _batch(61, [0, 0], 3)
    all_masked = _objective(
        "all_tokens_masked", nothing, [[[0]], [[1]]], {},
        title="A whole step without a scored token",
        source="https://github.com/NVIDIA-NeMo/Automodel/issues/3796",
        explanation="The step reports zero tokens and gives exactly zero gradients, so that the trainer "
        "can skip the update.",
    )  # fmt: skip
    all_masked["inputs"]["targets"] = [[-100] * 3] * 2
    all_masked["known_bugs"].append({"name": "nan_from_0_over_0", "values": {"loss": "nan"}})
    logits, targets, mask = _batch(71, [2, 1], 3, vocab=4)
    logits[0, 2] = [np.nan, 0.0, np.inf, 1.0]
    logits[1, 1] = [np.inf, np.inf, -np.inf, 0.0]
    nonfinite = _objective(
        "nonfinite_logits_at_masked_positions", (logits, targets, mask), [[[0, 1]]], {},
        title="NaN or infinite logits at masked positions stay out of loss and gradient",
        source="https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/5244",
        explanation="NaN * 0 is NaN, and masking only the result still sends NaN back through the "
        "softmax. Replace masked rows on the way in, then mask the result.",
    )  # fmt: skip
    nonfinite["known_bugs"].append({"name": "nan_times_zero", "values": {"loss": "nan"}})
    bad = xent_grad(np.nan_to_num(logits, nan=0.0, posinf=0.0, neginf=0.0), targets, mask / 3)
    bad[~np.isfinite(logits).all(-1)] = np.nan
    right = nonfinite["expected"]["loss"]
    nonfinite["known_bugs"].append(
        {"name": "loss_masked_but_gradient_nan", "values": plain({"loss": right, "grad_logits": bad})}
    )
    huge = _batch(81, [3, 3], 3)
    overflow = _objective(
        "large_logits_do_not_overflow", (huge[0] * 400, *huge[1:]), [[[0, 1]]], {},
        title="Logits of several hundred",
        source="https://github.com/google-deepmind/optax/issues/1020",
        explanation="exp overflows float32 above 88: subtract the row's maximum first.",
    )  # fmt: skip
    overflow["known_bugs"].append({"name": "exp_without_maximum", "values": {"loss": "inf"}})
    return [empty_step, all_masked, nonfinite, overflow]


def _granularities():
    batch = _batch(91, [6, 2, 0, 4], 6)
    mask = batch[2]
    rows = [row_group(mask.shape, [row]) for row in range(4)]
    sample = group_weights(mask, rows)
    token = mask / mask.sum()
    pairs = group_weights(mask, [row_group(mask.shape, [0, 1]), row_group(mask.shape, [2, 3])])
    schedule = [[[0], [2]], [[1], [3]]]
    packed = _batch(95, [6, 6], 6)
    segments = np.array([[1, 1, 1, 1, 2, 2], [1, 2, 2, 2, 2, 0]])
    packed_mask = packed[2] * (segments > 0)
    packed_mask[0, 3] = packed_mask[0, 5] = packed_mask[1, 0] = packed_mask[1, 4] = 0
    packed = (packed[0], packed[1], packed_mask)
    documents = [segments == 1, segments == 2]
    by_document = [document & row_group(segments.shape, [row]) for row in range(2) for document in documents]
    source = "RFC-0032, per-sample loss normalization in MaxText"
    megatron = "https://github.com/NVIDIA/Megatron-LM/issues/936"
    return [
        _objective(
            "sample_mean_with_an_empty_row", batch, schedule,
            {"token_mean": token, "empty_rows_not_counted": sample * 4 / 3, "micro_batch_mean": pairs},
            right=sample, granularity="sample",
            title="Mean over rows of each row's token mean; an empty row counts",
            source=source,
            explanation="Megatron's default with micro_batch_size=1 (RFC-0032). An empty row adds 0 to "
            "the numerator and 1 to the number of rows.",
        ),
        _objective(
            "micro_batch_mean_of_two_rows", batch, [[[0, 1], [2, 3]]],
            {"sample_mean": sample, "token_mean": token},
            right=pairs, granularity="micro_batch", micro_batch_size=2,
            title="Mean over groups of two consecutive rows",
            source=megatron,
            explanation="Megatron's default: tokens are pooled inside a micro-batch of two rows, then "
            "micro-batches have equal votes, whatever rank or step they are in.",
        ),
        _objective(
            "document_mean", packed, [[[0, 1]]],
            {"token_mean": packed_mask / packed_mask.sum(),
             "sample_mean": group_weights(packed_mask, [row_group(segments.shape, [row]) for row in range(2)]),
             "documents_without_tokens_not_counted": group_weights(packed_mask, by_document) * 4 / 3},
            right=group_weights(packed_mask, by_document), granularity="document", segment_ids=segments,
            title="Mean over packed documents; a document without scored tokens counts",
            source="https://github.com/verl-project/verl/issues/5625",
            explanation="A document is a (row, segment id) pair, id 0 is padding. Four documents here, "
            "one of them without a scored token.",
        ),
    ]  # fmt: skip


def _per_token():
    logits = np.array([[0.5, 1.25, -0.75, 2.0], [3.0, -1.5, 0.25, 0.125]])
    targets = np.array([3, 1])
    exact = xent(logits, targets)
    padded = quarters(101, 3, 7)
    padded_targets = integers(102, 5, 3)
    question = "Cross-entropy of each token, nats."
    chunked = _batch(111, [3, 2, 2], 3)
    losses = xent(*chunked[:2])
    return [
        case(
            "low_precision_logits", tier="core", task="per_token", title="bfloat16 logits, loss in float32",
            question=question, inputs={"logits": logits, "targets": targets},
            right={"xent": exact}, bugs={"returned_in_bfloat16": {"xent": to_bfloat16(exact)}},
            source="https://github.com/google-deepmind/optax/issues/1020", float32=(2e-6, 1e-7),
            explanation="Only the logits are low precision. Losses near 4 returned in bfloat16 move in "
            "steps of 1/32.",
        ),
        case(
            "padded_vocabulary", tier="core", task="per_token", title="Padding columns of the vocabulary",
            question=question, inputs={"logits": padded, "targets": padded_targets, "vocab_size": 5},
            right={"xent": xent(padded[:, :5], padded_targets)},
            bugs={"padding_columns_in_the_logsumexp": {"xent": xent(padded, padded_targets)},
                  "padding_columns_as_zero_logits": {
                      "xent": xent(np.concatenate([padded[:, :5], np.zeros((3, 2))], 1), padded_targets)}},
            source="https://github.com/apple/ml-cross-entropy/issues/59",
            explanation="The table is padded to a multiple of a tile or of the tensor axis. Only the "
            "first vocab_size columns are tokens; the rest must not enter the logsumexp.",
        ),
        case(
            "gathered_logits_not_summed_again", tier="core", task="per_token",
            title="Replicated logits must not go through the vocabulary-parallel reduction", question=question,
            inputs={"logits": padded, "targets": padded_targets, "num_replicas": 4},
            right={"xent": xent(padded, padded_targets)},
            bugs={"replicas_summed": {"xent": xent(padded, padded_targets) + np.log(4)}},
            source="https://github.com/NVIDIA/Megatron-LM/issues/7452",
            explanation="Summing exp over 4 ranks that all hold the full vocabulary adds log(4) to every "
            "token.",
        ),
        case(
            "evaluation_over_unequal_batches", tier="core", task="evaluation", title="Validation loss and perplexity",
            question="Loss, perplexity and number of tokens of the evaluation set; each entry of "
            "`batches` is one batch's rows.",
            inputs={"logits": chunked[0], "targets": chunked[1], "loss_mask": chunked[2], "batches": [[0], [1, 2]]},
            right=_evaluation(losses, chunked[2]),
            bugs={"mean_of_batch_means": _evaluation_of(
                (losses[0].mean() + (losses * chunked[2])[1:].sum() / 4) / 2),
                  "scaled_by_batches_as_in_training": _evaluation_of(2 * (losses * chunked[2]).sum() / 7)},
            source="https://github.com/pytorch/torchtitan/pull/4167",
            explanation="Keep sums and counts over batches, ranks and iterations; divide once; "
            "exponentiate last.",
        ),
    ]  # fmt: skip


def _evaluation(losses, mask):
    return {**_evaluation_of((losses * mask).sum() / mask.sum()), "num_tokens": int(mask.sum())}


def _evaluation_of(loss):
    return {"loss": loss, "perplexity": np.exp(loss)}


def _targets():
    logits = quarters(121, 2, 5, 4)
    labels = np.array([[1, 3, 0, 2, 1], [2, 2, 1, -100, -100]])
    shifted, mask = labels[:, 1:], (labels[:, 1:] >= 0).astype(float)
    losses = xent(logits[:, :-1], shifted, mask) * mask
    unshifted_mask = (labels >= 0).astype(float)
    unshifted = xent(logits, labels, unshifted_mask) * unshifted_mask
    return [
        case(
            "label_shift_counts_targets", tier="core", task="next_token",
            title="The denominator counts shifted targets",
            question="Loss and number of targets; logits at position t predict the label at t+1, labels "
            "below 0 are ignored.",
            inputs={"logits": logits, "labels": labels},
            right={"loss": losses.sum() / mask.sum(), "num_tokens": int(mask.sum())},
            bugs={"labels_counted_before_the_shift": {"loss": losses.sum() / unshifted_mask.sum()},
                  "not_shifted": {"loss": ratio(unshifted.sum(), unshifted_mask.sum())}},
            source="https://github.com/huggingface/transformers/pull/46204",
            explanation="Position 0 of a row is never a target. Counting before the shift makes the "
            "denominator too large.",
        ),
        _document_case(1, "packed_document_boundary"),
        _document_case(2, "second_depth_at_document_boundary"),
    ]  # fmt: skip


def _document_case(depth, name):
    """Targets `depth` ahead inside the same document."""
    tokens = np.array([[5, 2, 7, 1, 6, 3, 4, 2, 0, 0], [3, 1, 4, 1, 5, 2, 6, 5, 3, 7]])
    segments = np.array([[1, 1, 1, 1, 2, 2, 2, 3, 0, 0], [1] * 10])
    ahead = np.zeros_like(tokens)
    ahead[:, :-depth] = tokens[:, depth:]
    same = np.zeros_like(segments)
    same[:, :-depth] = (segments[:, depth:] == segments[:, :-depth]) & (segments[:, :-depth] > 0)
    across = np.zeros_like(same)
    across[:, :-depth] = (segments[:, depth:] > 0) & (segments[:, :-depth] > 0)
    return case(
        name, tier="core", task="targets", title="The last tokens of a packed document predict nothing in the next",
        question=f"Mask of the positions whose target, {depth} ahead, lies in the same document; the "
        "targets there (0 elsewhere); their number.",
        inputs={"tokens": tokens, "segment_ids": segments, "depth": depth},
        right={"targets": ahead * same, "mask": same, "num_tokens": int(same.sum())},
        bugs={"across_documents": {"mask": across, "num_tokens": int(across.sum())},
              "padding_scored": {"num_tokens": int(2 * (10 - depth))}},
        source="https://github.com/pytorch/torchtitan/pull/4075",
        explanation="A target is valid only if input and target lie in the same non-padding segment.",
    )  # fmt: skip
