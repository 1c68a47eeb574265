"""Trains the toy Ling-3 of `pair_settings` with this project and writes the `metrics.jsonl` of a run.

python -m tests.reference.train_pair --flag pt --out FOLDER
python -m tests.reference.train_pair --init FOLDER      # the initial weights, as a Hugging Face checkpoint
"""

import argparse
import pathlib
import sys

import equinox as eqx
import jax
import jax.numpy as jnp

from eqx_loss import LossSemantics
from model import KdaConfig, MlaConfig, ModelConfig, MoeConfig, MtpConfig, init_model
from model.hf import load_hf, save_hf
from train._examples import Batch
from train._mesh import MeshConfig, make_mesh
from train._metrics import Interval, MetricFiles, interval_row
from train._optimizer import DecayRule, OptimizerConfig
from train._schedule import ScheduleConfig
from train._state import TrainState, make_optimizer, state_shardings
from train._step import make_train_step

from . import pair_settings as settings


def main(arguments: list[str]) -> int:
    """Writes a run folder `FOLDER/FLAG` for every flag, or the initial weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--flag", choices=tuple(settings.FLAGS), nargs="*", default=list(settings.FLAGS))
    parser.add_argument("--weights", type=pathlib.Path, default=settings.WEIGHTS)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--out", type=pathlib.Path)
    where.add_argument("--init", type=pathlib.Path)
    chosen = parser.parse_args(arguments)
    if chosen.init is not None:
        model = init_model(MODEL, key=jax.random.key(settings.SEED))
        save_hf(chosen.init, model, dtype="float32")
        return 0
    for flag in chosen.flag:
        train(chosen.weights, chosen.out / flag, per_token=settings.FLAGS[flag])
    return 0


def semantics(per_token: bool) -> LossSemantics:
    """The loss of the run, in our rules; Megatron's for these settings."""
    return LossSemantics(
        calculate_per_token_loss=per_token,
        micro_batch_size=settings.MICRO_BATCH_SIZE,
        mtp_loss_scaling_factor=settings.MTP_LOSS_SCALING_FACTOR,
        moe_z_loss_weight=settings.MOE_Z_LOSS_COEFF,
        mask_padding_in_router_losses=True,
    )


OPTIMIZER = OptimizerConfig(
    schedule=ScheduleConfig(
        kind="cosine",
        peak=settings.PEAK,
        warmup_steps=settings.WARMUP_STEPS,
        total_steps=settings.NUM_STEPS,
        final=settings.FINAL,
    ),
    b1=settings.B1,
    b2=settings.B2,
    eps=settings.EPS,
    weight_decay=settings.WEIGHT_DECAY,
    decay_rules=(DecayRule("*A_log", 0.0), DecayRule("*dt_bias", 0.0)),
    max_grad_norm=settings.MAX_GRAD_NORM,
    router_bias_update_rate=settings.ROUTER_BIAS_UPDATE_RATE,
)
MODEL = ModelConfig(
    vocab_size=settings.VOCAB_SIZE,
    hidden_size=32,
    num_layers=4,
    layer_group_size=4,
    first_k_dense_replace=1,
    intermediate_size=64,
    initializer_range=0.05,
    kda=KdaConfig(num_heads=2, head_dim=16),
    mla=MlaConfig(
        num_heads=2, q_lora_rank=12, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=16
    ),
    moe=MoeConfig(
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        num_routing_groups=4,
        topk_routing_group=2,
        routed_scaling_factor=2.5,
    ),
    mtp=MtpConfig(num_layers=1),
)


def train(
    weights: pathlib.Path, out: pathlib.Path, *, per_token: bool, num_steps: int = settings.NUM_STEPS
) -> None:
    """Trains from the checkpoint folder `weights` and writes the metrics of every step to the folder `out`."""
    model_config, model = load_hf(weights, dtype="float32")
    loss = semantics(per_token)
    optimizer = make_optimizer(OPTIMIZER, model_config)
    mesh = make_mesh(MeshConfig(), devices=jax.devices()[: settings.DATA_RANKS])
    state = TrainState(
        model=model,
        optimizer=optimizer.init(model),
        step=jnp.zeros((), jnp.int32),
        num_skipped=jnp.zeros((), jnp.int32),
    )
    state = jax.device_put(state, state_shardings(model_config, optimizer, mesh))
    step = eqx.filter_jit(
        make_train_step(
            model_config, loss, optimizer, mesh, gradient_accumulation_steps=settings.MICRO_STEPS
        ),
        donate="all-except-first",
    )
    out.mkdir(parents=True, exist_ok=True)
    files = MetricFiles(out, start_step=0, use_tensorboard=False)
    for number, rows in enumerate(settings.batches(), start=1):
        if number > num_steps:
            break
        batch = Batch(
            tokens=jnp.asarray(rows.tokens),
            targets=jnp.asarray(rows.targets),
            loss_mask=jnp.asarray(rows.loss_mask),
            segment_ids=jnp.asarray(rows.segment_ids),
            positions=jnp.asarray(rows.positions),
        )
        state, output = step(batch, state)
        row = interval_row(Interval().add(output), output, loss, settings.MICRO_STEPS)
        files.write_metrics(number, row)
    files.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
