"""Evaluation against a slow float64 reading of the model's own hidden states."""

import equinox as eqx
import jax
import numpy as np
import pytest

from tests.train.tiny import tiny_config
from train._data import load_dataset, validation_batches
from train._evaluate import evaluation_row
from train._program import make_program

RTOL = 1e-5  # float32 logits and sums over some hundred tokens
OVERRIDES = ("model.mtp.num_layers=2", "model.initializer_range=0.3", "data.eod_mask_loss=false")


def oracle(hidden, mtp_hidden, unembed, rows):
    """Loss, bits per byte, MTP losses and acceptance rates, one position at a time."""
    heads = [np.asarray(h, np.float64) @ np.asarray(unembed, np.float64) for h in (hidden, *mtp_hidden)]
    num_rows, num_positions = rows.tokens.shape
    nats = [[] for _ in heads]
    accepted = [[] for _ in heads]
    num_bytes = 0
    for b in range(num_rows):
        for t in range(num_positions):
            num_bytes += bool(rows.loss_mask[b, t] and rows.targets[b, t] < 256)
            for k, logits in enumerate(heads):
                ahead = t + k
                if ahead >= num_positions or rows.segment_ids[b, ahead] != rows.segment_ids[b, t]:
                    continue
                if not rows.segment_ids[b, t] or not rows.loss_mask[b, ahead]:
                    continue
                x = logits[b, t]
                nats[k].append(np.log(np.sum(np.exp(x - x.max()))) + x.max() - x[rows.targets[b, ahead]])
                accepted[k].append(np.argmax(x) == np.argmax(heads[0][b, ahead]))
    return nats, accepted, num_bytes


def _with_few_winners(state):
    """Large scores for four tokens only: the heads of an untrained model then agree now and then."""
    head = state.model.head
    larger = jax.device_put(head.at[:, 4:].multiply(0.01), head.sharding)
    return eqx.tree_at(lambda s: s.model.head, state, larger)


@pytest.mark.parametrize("num_devices", [1, 4])
def test_evaluation_equals_a_position_by_position_reading(tmp_path, num_devices):
    mesh = ("mesh.context=2", "mesh.fsdp=2") if num_devices == 4 else ()
    config = tiny_config(tmp_path, *OVERRIDES, *mesh)
    dataset = load_dataset(config.data, config.batch.num_positions)
    program = make_program(config, dataset, jax.devices()[:num_devices])
    state = _with_few_winners(program.init_state())
    row = evaluation_row(program.evaluate(state))
    model = jax.device_put(jax.device_get(state.model))
    nats, accepted, num_bytes = [[], [], []], [[], [], []], 0
    forward = jax.jit(lambda *args: model(args[0], segment_ids=args[1], positions=args[2]))
    for rows in validation_batches(dataset, 4, 4):
        out = forward(rows.tokens, rows.segment_ids, rows.positions)
        part = oracle(out.hidden, out.mtp_hidden, model.unembed, rows)
        for k in range(3):
            nats[k] += part[0][k]
            accepted[k] += part[1][k]
        num_bytes += part[2]
    assert 0 < np.mean(accepted[1]) < 1
    assert row["eval/total_weights"] == len(nats[0])
    expected = {
        "lm_loss": np.mean(nats[0]),
        "perplexity": np.exp(np.mean(nats[0])),
        "bits_per_byte": np.sum(nats[0]) / np.log(2) / num_bytes,
        "raw_mtp_loss": np.mean(nats[1]),
        "raw_mtp_loss_depth_2": np.mean(nats[2]),
        "mtp_acceptance_rate_percent": 100 * np.mean(accepted[1]),
        "mtp_acceptance_rate_percent_depth_2": 100 * np.mean(accepted[2]),
    }
    for name, value in expected.items():
        assert row[f"eval/{name}"] == pytest.approx(value, rel=RTOL), name
