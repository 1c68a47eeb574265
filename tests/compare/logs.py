"""Writes logs as the trainers write them. Imports nothing of ours.

Formats: Megatron-LM `training_log` (sample line in inclusionAI/Ling-V2 docs), MaxText
`metric_logger.py`, torchtitan `metrics.py`, transformers `trainer_state.json`, TensorBoard
through tensorboardX.
"""

import json

import numpy as np


def curve(num_steps, *, seed=0, start=10.0, end=2.0, noise=0.02):
    """A loss curve with batch noise, float64."""
    rng = np.random.default_rng(seed)
    steps = np.arange(num_steps)
    return end + (start - end) * np.exp(-steps / (num_steps / 4)) + noise * rng.standard_normal(num_steps)


def megatron_line(iteration, lm, mtp=None, *, z=None, total=1000, lr=2.999998e-05, grad_norm=0.258, tail="|"):
    fields = [
        f"iteration {iteration:8d}/{total:8d}",
        f"consumed samples: {iteration * 16:12d}",
        "elapsed time per iteration (ms): 1812.3",
        "throughput per GPU (TFLOP/s/GPU): 145.2",
        f"learning rate: {lr:.6E}",
        "global batch size:    16",
    ]
    if lm is not None:
        fields.append(f"lm loss: {lm:.6E}")
    if z is not None:
        fields.append(f"z_loss: {z:.6E}")
    if mtp is not None:
        fields.append(f"mtp_1 loss: {mtp:.6E}")
    fields += [
        "loss scale: 1.0",
        f"grad norm: {grad_norm:.3f}",
        "number of skipped iterations:   0",
        "number of nan iterations:   0",
    ]
    return " [2026-04-29 12:00:00] " + " | ".join(fields) + " " + tail


def megatron_text(lm, mtp=None, *, first=1):
    lines = ["> building train, validation, and test datasets ...", "training ..."]
    for i, value in enumerate(lm):
        lines.append(megatron_line(first + i, value, None if mtp is None else mtp[i]))
        if (first + i) % 50 == 0:
            lines.append("-" * 80)
            lines.append(
                f" validation loss at iteration {first + i} on validation set | lm loss value: "
                "9.876543E+00 | lm loss PPL: 1.946E+04 | "
            )
    return "\n".join(lines) + "\n"


def maxtext_line(step, lm, mtp=None, *, loss=None, z=3.4846, weights=8289372, device_rate=245.836):
    mtp = 0.0 if mtp is None else mtp
    loss = lm + 0.1 * mtp + 2.4e-4 if loss is None else loss
    return (
        f"completed step: {step}, seconds: 10.493, TFLOP/s/device: {device_rate:.3f}, Tokens/s/device: "
        f"1561.409, Tokens(B)/device/day: 0.135, total_weights: {weights}, loss: {loss:.6f}, lm_loss: "
        f"{lm:.6f}, lr: 2.544001e-05, global_batch_size: 1024, mtp_loss: {0.1 * mtp:.6f}, raw_mtp_loss: "
        f"{mtp:.6f}, moe_lb_loss: 0.000000, moe_z_loss: {z:.4f}, router_topk_weight_mean: 1.250000e-01, "
        "router_probs_std: 1.0e-03, router_bias_mean: 1.961675e-11, router_bias_std: 1.801720e-02, "
        "grad_norm: 0.030, raw_grad_norm: 0.030, num_zeros: 666582257, skipped_iters: 0, nan_iters: 0"
    )


def maxtext_text(lm, mtp=None, *, first=0):
    lines = [
        "I0826 05:32:11.123456 139872 max_utils.py:99] num params 7.9 billion",
        "System Information: Jax Version",
    ]
    for i, value in enumerate(lm):
        lines.append(maxtext_line(first + i, value, None if mtp is None else mtp[i]))
        if (first + i) % 50 == 49:
            lines.append(f"eval metrics after step: {first + i}, loss=9.876, total_weights=1024.0")
    return "\n".join(lines) + "\n"


def metrics_jsonl(lm, mtp=None, *, first=0, **extra):
    rows = []
    for i, value in enumerate(lm):
        row = {"step": float(first + i), "run_name": "ours", "learning/lm_loss": float(value)}
        row["learning/loss"] = float(value) + 0.3
        if mtp is not None:
            row["learning/raw_mtp_loss"] = float(mtp[i])
            row["learning/mtp_loss"] = 0.1 * float(mtp[i])
        row.update({name: float(series[i]) for name, series in extra.items()})
        rows.append(json.dumps(row))
    return "\n".join(rows) + "\n"


def torchtitan_text(loss, *, first=1, color=True):
    lines = ["[titan] 2026-05-01 10:00:00,000 - root - INFO - Starting job: Llama 3 debug training"]
    red, green, reset = ("\x1b[31m", "\x1b[32m", "\x1b[39m") if color else ("", "", "")
    for i, value in enumerate(loss):
        lines.append(
            f"[rank0]:[titan] 2026-05-01 10:00:{i % 60:02d},123 - root - INFO - {red}step: {first + i:2d}  "
            f"{green}loss: {value:8.5f}  \x1b[38;2;180;60;0mgrad_norm:  1.2345  "
            "\x1b[38;2;54;234;195mmemory:  9.53GiB(10.03%)  \x1b[34mtps: 12,345  \x1b[36mtflops: 56.78  "
            f"\x1b[35mmfu: 18.20%{reset}"
        )
    lines.append(
        "[rank0]:[titan] 2026-05-01 10:09:00,123 - root - INFO - validate step: 10  loss:  9.8765  "
        "memory: 1GiB"
    )
    return "\n".join(lines) + "\n"


def trainer_state(loss, *, first=1):
    history = []
    for i, value in enumerate(loss):
        step = first + i
        history.append(
            {
                "epoch": 0.01 * step,
                "grad_norm": 1.25,
                "learning_rate": 5e-05,
                "loss": float(value),
                "step": step,
            }
        )
        if step % 10 == 0:
            history.append({"epoch": 0.01 * step, "eval_loss": 9.876, "eval_runtime": 1.0, "step": step})
    history.append({"epoch": 1.0, "step": first + len(loss) - 1, "train_loss": 5.4, "train_runtime": 10.0})
    return json.dumps(
        {"best_metric": None, "global_step": len(loss), "log_history": history, "max_steps": len(loss)}
    )


def reference_json(lm, mtp):
    losses = [
        {
            "megatron_iteration": i + 2,
            "maxtext_step": i,
            "lm_loss": float(f"{a:.6f}"),
            "mtp_loss": float(f"{b:.6f}"),
        }
        for i, (a, b) in enumerate(zip(lm, mtp))
    ]
    return json.dumps(
        {"description": "1000 iterations", "source": "megatron-varlen.log", "global_batch_size": 16,
         "sequence_length": 8192, "losses": losses}
    )  # fmt: skip


def golden_json(lm):
    values = {str(i + 1): float(value) for i, value in enumerate(lm)}
    entry = {"start_step": 1, "end_step": len(lm), "step_interval": 1, "values": values}
    return json.dumps({"lm loss": entry, "num-zeros": {**entry, "values": {"1": "nan"}}})


def wandb_csv(lm, *, run="tpu-run-3", first=0):
    column = f"{run} - learning/lm_loss"
    lines = [f'"Step","{column}","{column}__MIN","{column}__MAX"']
    lines += [
        f'"{first + i}","{value!r}","{value - 1!r}","{value + 1!r}"' for i, value in enumerate(map(float, lm))
    ]
    return "\n".join(lines) + "\n"


def write_events(folder, lm, mtp=None, *, first=0, names=("learning/lm_loss", "learning/raw_mtp_loss")):
    """TensorBoard events through tensorboardX; returns the event file."""
    import tensorboardX

    writer = tensorboardX.SummaryWriter(str(folder), flush_secs=1)
    for i, value in enumerate(lm):
        writer.add_scalar(names[0], float(value), first + i)
        if mtp is not None:
            writer.add_scalar(names[1], float(mtp[i]), first + i)
    writer.add_text("config", "not a scalar", 0)
    writer.close()
    return next(folder.glob("*tfevents*"))
