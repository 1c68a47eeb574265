"""What a found signature means, in words."""

import dataclasses
import enum
import math

# Sizes of a covariance gap between per-sample and per-token means that occur in practice:
# RFC-0032 reports about 0.1 %; a factor ten to both sides.
GAP_SIZES = (1e-4, 1e-2)


class Signature(enum.Enum):
    """What a difference looks like."""

    NOT_FINITE = "not_finite"
    STEP_SHIFT = "step_shift"
    CONSTANT_FACTOR = "constant_factor"
    COVARIANCE_GAP = "covariance_gap"
    CONSTANT_OFFSET = "constant_offset"
    TERM_INCLUDED = "term_included"
    DIVERGENCE = "divergence"
    DIFFERENT_START = "different_start"
    DIFFERENT_DATA = "different_data"
    DRIFT = "drift"
    ISOLATED_STEPS = "isolated_steps"
    UNKNOWN = "unknown"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cause:
    """A signature and a sentence that says what was seen, what it means and where to look."""

    signature: Signature
    text: str


def factor_cause(channel: str, factor: float) -> Cause:
    """What a constant ratio `candidate / reference` means, by its value."""
    seen = f"constant factor {factor:.6g} (candidate / reference)"
    number = factor if factor >= 1 else 1 / factor if factor > 0 else 0.0
    whole = round(number)
    if channel.startswith("mtp") and factor < 0.9:
        meaning = (
            "one log carries the coefficient mtp_loss_scaling_factor, or a mean over micro-steps is taken "
            "twice"
        )
    elif math.isclose(number, 1 / math.log(2), rel_tol=2e-3):
        meaning = "one log is in bits per token, the other in nats"
    elif 2 <= whole <= 65536 and math.isclose(number, whole, rel_tol=5e-3):
        direction = "summed instead of averaged" if factor > 1 else "divided once too often"
        meaning = f"{direction} over {whole} micro-steps, ranks or context shards (loss or log)"
    elif 0 < abs(factor - 1) < 0.5:
        count = 1 / abs(1 - factor) if factor > 1 else factor / (1 - factor)
        meaning = (
            f"another label count in the denominator (about 1 in {count:.4g} tokens): labels counted "
            "before the shift, padding or ignored labels counted, or a mask missing"
        )
    else:
        meaning = "number of steps or ranks, label count, or a loss coefficient"
    return Cause(signature=Signature.CONSTANT_FACTOR, text=f"{seen}: {meaning}")


def offset_cause(offset: float, rel: float) -> Cause:
    for count in range(2, 65):
        if math.isclose(abs(offset), math.log(count), rel_tol=5e-4):
            return Cause(
                signature=Signature.CONSTANT_OFFSET,
                text=f"constant offset {offset:+.6g} = log({count}): exp summed over {count} replicas of "
                "the logits (gathered logits reduced again over the tensor axis)",
            )
    if GAP_SIZES[0] <= abs(rel) <= GAP_SIZES[1]:
        return gap_cause(rel)
    return Cause(
        signature=Signature.CONSTANT_OFFSET,
        text=f"constant offset {offset:+.6g} nats ({rel:+.4%}): one run adds a constant term, or padding "
        "columns of the vocabulary enter the logsumexp",
    )


def gap_cause(rel: float) -> Cause:
    return Cause(
        signature=Signature.COVARIANCE_GAP,
        text=f"constant offset {rel:+.4%}, of the size of the covariance gap: per-sample against per-token "
        "normalization (sample - token = -Cov(n, mean loss) / E[n]); a z-term in the loss looks alike "
        "when no z channel is logged. Compare calculate_per_token_loss and micro_batch_size of both runs",
    )


def term_cause(name: str, coefficient: float) -> Cause:
    who = "candidate" if coefficient > 0 else "reference"
    label = {"router_z": "z-term (router z-loss)", "lm_z": "z-term (lm-head z-loss)", "mtp": "MTP term"}.get(
        name, name
    )
    return Cause(
        signature=Signature.TERM_INCLUDED,
        text=f"{label} included in the {who}: difference = {coefficient:+.4g} x {name}; read the term-free "
        "channel, or map it with --map",
    )
