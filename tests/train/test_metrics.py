"""Rows of metrics: pooled sums over pooled counts, exact files."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from eqx_loss import LossLogs, LossSemantics, Objective, SumCount
from train._metrics import METRICS_FILE, PERF_FILE, Interval, MetricFiles, interval_row, read_rows
from train._step import StepOutput

RTOL = 1e-6  # float32 arithmetic on a handful of numbers
SEMANTICS = LossSemantics(
    calculate_per_token_loss=False,
    mtp_loss_scaling_factor=0.25,
    moe_z_loss_weight=0.5,
    load_balance_loss_weight=0.125,
    z_loss_multiplier=1e-2,
)


def pair(rng, *shape):
    return SumCount(
        jnp.asarray(rng.uniform(1, 9, shape), jnp.float32),
        jnp.asarray(rng.integers(1, 9, shape), jnp.float32),
    )


def output(
    seed: int,
    is_skipped: bool = False,
    num_layers: int = 3,
    num_depths: int = 2,
    max_logits=None,
    overflow=None,
) -> StepOutput:
    rng = np.random.default_rng(seed)
    scalars = [jnp.float32(x) for x in rng.uniform(1, 2, 9)]
    logs = LossLogs(
        lm=pair(rng),
        mtp=pair(rng, num_depths),
        router_z=pair(rng, num_layers),
        load_balance=pair(rng, num_layers),
        lm_z=pair(rng),
        lm_group=pair(rng),
        router_z_global=pair(rng, num_layers),
    )
    return StepOutput(
        objective=Objective(*scalars[:7]),
        logs=logs,
        grad_norm=scalars[7],
        raw_grad_norm=scalars[8],
        is_skipped=jnp.array(is_skipped),
        num_skipped=jnp.int32(0),
        learning_rate=jnp.float32(0.5 + seed),
        step=jnp.int32(seed),
        router_counts=None,
        overflow=overflow,
        max_logits=max_logits,
    )


def interval(outputs) -> Interval:
    total = Interval()
    for each in outputs:
        total = total.add(each)
    return total


@pytest.mark.parametrize("num_steps", [1, 3])
def test_row_holds_pooled_sums_over_pooled_counts(num_steps):
    outputs = [output(seed) for seed in range(num_steps)]
    row = interval_row(interval(outputs), outputs[0], SEMANTICS, 2)

    def pooled(field):
        sums = np.sum([np.asarray(getattr(o.logs, field).sum, np.float64) for o in outputs], axis=0)
        return sums / np.sum([np.asarray(getattr(o.logs, field).count, np.float64) for o in outputs], axis=0)

    def mean(values):
        return np.mean([float(v) for v in values])

    lm, mtp, z, balance = (pooled(f) for f in ("lm", "mtp", "router_z", "load_balance"))
    expected = {
        "loss": lm
        + 0.25 * mtp.mean()
        + 0.5 * z.sum()
        + 0.125 * balance.sum()
        + mean(o.objective.lm_z for o in outputs),
        "objective": mean(o.objective.total for o in outputs),
        "objective_lm": mean(o.objective.lm for o in outputs),
        "lm_loss": lm,
        "perplexity": np.exp(lm),
        "mtp_loss": 0.25 * mtp.mean(),
        "raw_mtp_loss": mtp.mean(),
        "moe_z_loss": z.mean(),
        "moe_lb_loss": balance.mean(),
        "z_loss": 1e-2 * pooled("lm_z"),
        "lm_estimator_gap": pooled("lm_group") - lm,
        "moe_z_estimator_gap": (z - pooled("router_z_global")).mean(),
        "grad_norm": mean(o.grad_norm for o in outputs),
        "raw_grad_norm": mean(o.raw_grad_norm for o in outputs),
        "total_weights": mean(o.logs.lm.count for o in outputs),
        "num_skipped_steps": 0.0,
        "current_learning_rate": 0.5 + num_steps - 1,
    }
    assert set(row) == {f"learning/{name}" for name in expected}
    for name, value in expected.items():
        assert row[f"learning/{name}"] == pytest.approx(value, rel=RTOL, abs=RTOL), name


def test_dropped_copies_are_added_over_steps_and_layers_exactly_across_a_checkpoint():
    """More than float32 holds; no row of a run whose buffer has room for all."""
    counts = [np.array([2**24, 1, 0], np.int32), np.array([1, 0, 2**30], np.int32)]
    first, second = (output(seed, overflow=count) for seed, count in enumerate(counts))
    total = Interval.from_json(json.loads(json.dumps(interval([first]).to_json()))).add(second)
    row = interval_row(total, first, SEMANTICS, 1)
    assert row["learning/moe_overflow_copies"] == 2**24 + 2 + 2**30
    assert "learning/moe_overflow_copies" not in interval_row(interval([output(0)]), first, SEMANTICS, 1)


def test_loss_is_the_objective_without_accumulation():
    outputs = [output(seed) for seed in range(3)]
    row = interval_row(interval(outputs), outputs[0], SEMANTICS, 1)
    assert row["learning/loss"] == row["learning/objective"]


def test_a_dense_model_without_mtp_logs_zeros_for_them():
    one = output(0, num_layers=0, num_depths=0)
    quiet = LossSemantics(calculate_per_token_loss=True)
    row = interval_row(interval([one]), one, quiet, 1)
    for name in ("mtp_loss", "raw_mtp_loss", "moe_z_loss", "moe_lb_loss", "moe_z_estimator_gap"):
        assert row[f"learning/{name}"] == 0.0


def test_skipped_steps_are_counted():
    outputs = [output(0, True), output(1), output(2, True)]
    assert interval_row(interval(outputs), outputs[0], SEMANTICS, 1)["learning/num_skipped_steps"] == 2.0


def test_an_interval_cut_by_a_checkpoint_gives_the_same_row_to_the_bit():
    outputs = [output(seed) for seed in range(5)]
    whole = interval(outputs)
    first = interval(outputs[:2])
    resumed = Interval.from_json(json.loads(json.dumps(first.to_json())))
    for each in outputs[2:]:
        resumed = resumed.add(each)
    assert resumed.to_json() == whole.to_json()
    assert interval_row(resumed, outputs[0], SEMANTICS, 2) == interval_row(whole, outputs[0], SEMANTICS, 2)


def test_an_empty_interval_survives_json():
    assert Interval.from_json(json.loads(json.dumps(Interval().to_json()))) == Interval()


def test_largest_attention_logit_of_an_interval_is_logged_where_it_is_recorded():
    tops = ([[3.0, -7.0], [2.0, 5.0]], [[1.0, 9.0], [-np.inf, 2.0]], [[4.0, 4.0], [4.0, 4.0]])
    outputs = [output(seed, max_logits=np.asarray(top, np.float32)) for seed, top in enumerate(tops)]
    total = Interval.from_json(json.loads(json.dumps(interval(outputs).to_json())))
    assert interval_row(total, outputs[0], SEMANTICS, 2)["learning/max_logits"] == 9
    assert "learning/max_logits" not in interval_row(interval([output(0)]), output(0), SEMANTICS, 2)
    bad = output(1, max_logits=np.asarray([[np.nan, 1.0]], np.float32))
    assert np.isnan(interval([outputs[0], bad, outputs[2]]).max_logits)


def test_files_are_cut_behind_the_start_step_and_a_torn_line_is_dropped(tmp_path):
    rows = [{"step": s, "a": 0.1 * s} for s in (1, 2, 3)]
    for name in (METRICS_FILE, PERF_FILE):
        (tmp_path / name).write_text("".join(json.dumps(r) + "\n" for r in rows) + '{"step": 4, "a"')
    files = MetricFiles(tmp_path, start_step=2, use_tensorboard=False)
    files.write_metrics(3, {"a": 7.0})
    assert read_rows(tmp_path / METRICS_FILE) == [
        *rows[:2],
        {"step": 3, "a": 7.0},
    ]  # on disk before it is closed
    files.close()
    assert read_rows(tmp_path / PERF_FILE) == rows[:2]


def test_a_fresh_start_empties_the_files(tmp_path):
    (tmp_path / METRICS_FILE).write_text('{"step": 1}\n')
    MetricFiles(tmp_path, start_step=0, use_tensorboard=False).close()
    assert read_rows(tmp_path / METRICS_FILE) == []


def test_tensorboard_receives_every_value(tmp_path):
    files = MetricFiles(tmp_path, start_step=0, use_tensorboard=True)
    files.write_metrics(1, {"learning/lm_loss": 2.5})
    files.write_perf(1, {"perf/tokens_per_second": 9.0})
    files.close()
    events = b"".join(p.read_bytes() for p in (tmp_path / "tensorboard").iterdir())
    assert b"learning/lm_loss" in events
    assert b"perf/tokens_per_second" in events
