"""A tiny model with every kind of part, uneven packed batches, and compiled gradients on meshes of fake devices."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from eqx_loss import LossSemantics
from model import ExpertExchange, MlaConfig, ModelConfig, MoeConfig, MtpConfig, Transformer
from train._examples import Batch, Examples
from train._gradient import batch_gradient
from train._mesh import MESH_AXES, MeshConfig, make_mesh
from train._optimizer import OptimizerConfig
from train._schedule import ScheduleConfig
from train._state import init_state, make_optimizer
from train._step import StepConfig, make_gradient_plan, micro_steps_of

NUM_ROWS, NUM_POSITIONS, VOCAB_SIZE = 16, 32, 64
# Programs of these tests run a few times: compiling them well costs more than running them slowly.
COMPILER_OPTIONS = {"xla_backend_optimization_level": 0}
OPTIMIZER = OptimizerConfig(schedule=ScheduleConfig(peak=1e-2, warmup_steps=2))
SEMANTICS = LossSemantics(
    calculate_per_token_loss=False,
    moe_z_loss_weight=1e-2,
    load_balance_loss_weight=1e-2,
    z_loss_multiplier=1e-3,
)


def tiny_config(**changes: Any) -> ModelConfig:
    """One dense layer, two scanned MoE layers, one MTP depth; float32. 12 experts divide over 4 devices, not over 8."""
    fields: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "num_layers": 3,
        "intermediate_size": 32,
        "first_k_dense_replace": 1,
        "mla": MlaConfig(
            num_heads=4,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_nope_head_dim=8,
            qk_rope_head_dim=8,
            v_head_dim=8,
        ),
        "moe": MoeConfig(
            num_experts=12, num_experts_per_tok=2, moe_intermediate_size=16, num_routing_groups=2
        ),
        "mtp": MtpConfig(num_layers=1),
        "dtype": "float32",
    }
    return ModelConfig(**{**fields, **changes})


def packed_batch(seed: int = 0, num_rows: int = NUM_ROWS, num_positions: int = NUM_POSITIONS) -> Batch:
    """Rows of up to three documents, some padded, with uneven masks and one row that scores nothing."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, VOCAB_SIZE, (num_rows, num_positions + 1))
    segment_ids = np.zeros((num_rows, num_positions), np.int32)
    positions = np.zeros_like(segment_ids)
    for row in range(num_rows):
        last = num_positions - (5 if row % 3 == 0 else 0)
        ends = [*np.sort(rng.choice(np.arange(1, last), 2, replace=False)), last]
        start = 0
        for document, end in enumerate(ends, start=1):
            segment_ids[row, start:end] = document
            positions[row, start:end] = np.arange(end - start)
            start = end
    loss_mask = (rng.random((num_rows, num_positions)) < 0.8) & (segment_ids > 0)
    loss_mask[num_rows // 4] = False
    loss_mask[num_rows // 3, 3:] = False
    return Batch(
        tokens=jnp.asarray(tokens[:, :-1], jnp.int32),
        targets=jnp.asarray(tokens[:, 1:], jnp.int32),
        loss_mask=jnp.asarray(loss_mask),
        segment_ids=jnp.asarray(segment_ids),
        positions=jnp.asarray(positions),
    )


def mesh_of(**sizes: int) -> jax.sharding.Mesh:
    """A mesh of the first fake devices; axes that are not named have one device."""
    config = MeshConfig(**{name: sizes.get(name, 1) for name in MESH_AXES})
    count = int(np.prod(config.sizes))
    return make_mesh(config, devices=jax.devices()[:count])


@functools.cache
def tiny_model(config: ModelConfig) -> Transformer:
    """Parameters on one device."""
    optimizer = make_optimizer(OPTIMIZER, config)
    return init_state(config, optimizer, mesh_of(), key=jax.random.key(1)).model


class GradientCase:
    """Gradient and totals of a batch on one mesh; compiled once for both values of calculate_per_token_loss."""

    def __init__(
        self,
        mesh: jax.sharding.Mesh,
        num_micro_steps: int = 1,
        model_config: ModelConfig | None = None,
        semantics: LossSemantics = SEMANTICS,
        config: StepConfig | None = None,
        exchange: ExpertExchange | None = None,
    ) -> None:
        self.model_config = tiny_config() if model_config is None else model_config
        self.mesh, self.num_micro_steps, self.semantics = mesh, num_micro_steps, semantics
        optimizer = make_optimizer(OPTIMIZER, self.model_config)
        self.plan = make_gradient_plan(
            self.model_config,
            semantics,
            optimizer,
            mesh,
            StepConfig() if config is None else config,
            exchange,
        )
        shardings = jax.tree.map(lambda p: NamedSharding(mesh, p), self.plan.layout.partitions)
        self.model = jax.device_put(tiny_model(self.model_config), shardings)
        self._compiled = None

    @functools.cached_property
    def hlo(self) -> str:
        """The optimized program."""
        self(False)
        return self._compiled.as_text()

    def __call__(self, per_token: bool, batch: Batch | None = None) -> tuple[Any, Any]:
        """(gradient, totals) on the host; the flag enters through the weights alone."""
        semantics = dataclasses.replace(self.semantics, calculate_per_token_loss=per_token)
        steps = self.steps(packed_batch() if batch is None else batch, semantics)
        if self._compiled is None:
            self._compiled = (
                jax.jit(self.gradient).lower(self.model, steps).compile(compiler_options=COMPILER_OPTIONS)
            )
        return jax.tree.map(np.asarray, self._compiled(self.model, steps))

    def gradient(self, model: Transformer, steps: Examples) -> tuple[Any, Any]:
        """(gradient, totals), to be compiled."""
        return batch_gradient(self.plan, model, steps, None)

    def steps(self, batch: Batch, semantics: LossSemantics | None = None) -> Examples:
        """Micro-steps of a batch on the mesh."""
        cut = jax.jit(
            lambda b: micro_steps_of(
                b, self.plan, semantics or self.semantics, self.model_config, self.num_micro_steps
            )
        )
        return cut(batch)


def relative_rms(got: Any, want: Any) -> float:
    """Largest over leaves of rms(got - want) / rms(want); leaves that are zero must be zero on both sides."""
    worst = 0.0
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        scale = np.sqrt(np.mean(b**2)) if b.size else 0.0
        gap = np.sqrt(np.mean((a - b) ** 2)) if b.size else 0.0
        worst = max(worst, gap / scale if scale > 0 else (0.0 if gap == 0 else np.inf))
    return worst
