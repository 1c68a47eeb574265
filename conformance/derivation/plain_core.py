"""Core tier re-derived in plain Python."""

import decimal

from arithmetic import CONTEXT, derivative, exact, grid, group_means_weights, rows_group, xent_of_row


def groups_of(inputs):
    mask = inputs["loss_mask"]
    everything = grid(mask)
    kind = inputs["granularity"]
    if kind == "token":
        return [everything]
    if kind == "sample":
        return [rows_group(mask, [b]) for b in range(len(mask))]
    if kind == "micro_batch":
        size = inputs["micro_batch_size"]
        return [rows_group(mask, range(b, b + size)) for b in range(0, len(mask), size)]
    segments = inputs["segment_ids"]
    names = sorted({(b, segments[b][s]) for b, s in everything if segments[b][s] != 0})
    return [[(b, s) for b, s in everything if (b, segments[b][s]) == name] for name in names]


def objective(inputs):
    mask, logits, targets = inputs["loss_mask"], inputs["logits"], inputs["targets"]
    weights = group_means_weights(mask, groups_of(inputs))
    loss = decimal.Decimal(0)
    gradients = [[[0.0] * len(row) for row in rows] for rows in logits]
    for (b, s), weight in weights.items():
        if not weight:
            continue
        row, target = [exact(x) for x in logits[b][s]], targets[b][s]
        factor = CONTEXT.divide(decimal.Decimal(weight.numerator), decimal.Decimal(weight.denominator))
        loss += factor * xent_of_row(row, target)
        for v in range(len(row)):
            slope = derivative(lambda moved, target=target: xent_of_row(moved, target), row, v)
            gradients[b][s][v] = float(factor * slope)
    return {"loss": float(loss), "num_tokens": sum(map(sum, mask)), "grad_logits": gradients}


def per_token(inputs):
    size = inputs.get("vocab_size")
    cap, smoothing = inputs.get("logit_soft_cap"), inputs.get("label_smoothing", 0.0)
    answers = []
    for row, target in zip(inputs["logits"], inputs["targets"]):
        row = [exact(x) for x in row[:size]]
        if cap is not None:
            # tanh(x) = 1 - 2 / (exp(2 x) + 1)
            row = [exact(cap) * (1 - CONTEXT.divide(2, CONTEXT.exp(2 * x / exact(cap)) + 1)) for x in row]
        picked = xent_of_row(row, target)
        everywhere = sum(xent_of_row(row, v) for v in range(len(row))) / len(row)
        answers.append(float((1 - exact(smoothing)) * picked + exact(smoothing) * everywhere))
    return {"xent": answers}


def evaluation(inputs):
    losses = [
        xent_of_row([exact(x) for x in inputs["logits"][b][s]], inputs["targets"][b][s])
        for rows in inputs["batches"]
        for b in rows
        for s, scored in enumerate(inputs["loss_mask"][b])
        if scored
    ]
    loss = sum(losses) / len(losses)
    return {"loss": float(loss), "perplexity": float(CONTEXT.exp(loss)), "num_tokens": len(losses)}


def next_token(inputs):
    losses = [
        xent_of_row([exact(x) for x in rows[t]], labels[t + 1])
        for rows, labels in zip(inputs["logits"], inputs["labels"])
        for t in range(len(rows) - 1)
        if labels[t + 1] >= 0
    ]
    return {"loss": float(sum(losses) / len(losses)), "num_tokens": len(losses)}


def shifted_targets(inputs):
    depth, targets, mask = inputs["depth"], [], []
    for tokens, segments in zip(inputs["tokens"], inputs["segment_ids"]):
        valid = [
            t + depth < len(tokens) and segments[t] != 0 and segments[t + depth] == segments[t]
            for t in range(len(tokens))
        ]
        mask.append([int(ok) for ok in valid])
        targets.append([tokens[t + depth] if ok else 0 for t, ok in enumerate(valid)])
    return {"targets": targets, "mask": mask, "num_tokens": sum(map(sum, mask))}
