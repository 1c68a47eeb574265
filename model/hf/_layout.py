"""Which checkpoint tensor holds which of our arrays: the naming table of Ling-3 as data.

Names are those of released checkpoints (hub). The other spellings are renamed to them when read (`checkpoint_name`):
save_pretrained's `attention.dense` of KDA layers, and the module names of transformers.
Source: transformers 5.24.0, conversion_mapping.py, "bailing_hybrid".
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np

from .._config import ModelConfig
from ._errors import CheckpointError
from ._hf_config import LayerType, Layout
from ._rule import Rule, linear, split_linear, whole

EXPERTS_FUSED = ".mlp.experts.gate_up_proj"
CONV_FUSED = ".attention.conv1d.weight"
_RENAMES = (
    (re.compile(r"^model\.embed_tokens\."), "model.word_embeddings."),
    (re.compile(r"\.self_attn\."), ".attention."),
    (re.compile(r"\.attention\.forget_gate\."), ".attention."),
    (re.compile(r"\.e_score_correction_bias$"), ".expert_bias"),
    (re.compile(r"\.post_norm\.weight$"), ".final_layernorm.weight"),
)
_OUTPUT = re.compile(r"^(model\.layers\.(\d+)\.attention)\.(?:dense|o_proj)\.weight$")
_KDA_ONLY = re.compile(
    r"^model\.layers\.(\d+)\.attention\.(?:A_log|dt_bias|[fbkv]_proj\.weight|[qkv_]*conv1d\.weight|o_norm\.weight)$"
)


def checkpoint_names(names: Iterator[str]) -> dict[str, str]:
    """Hub name -> name in the file, for every tensor of a checkpoint in any spelling.

    Raises:
        CheckpointError: Two tensors are spellings of one.
    """
    stored = list(names)
    hub = {name: _rename(name) for name in stored}
    kda = _kda_layers(hub.values())
    result: dict[str, str] = {}
    problems: list[str] = []
    for name in stored:
        match = _OUTPUT.match(hub[name])
        new = (
            hub[name]
            if match is None
            else f"{match[1]}.{'o_proj' if int(match[2]) in kda else 'dense'}.weight"
        )
        if new in result:
            problems.append(f"{name}: is another spelling of {result[new]}, which is stored too; remove one")
        result[new] = name
    if problems:
        raise CheckpointError(problems)
    return result


def layer_types_of(hub_names: Iterator[str], num_layers: int) -> tuple[LayerType, ...]:
    """Kind of every layer by the tensors it has."""
    kda = _kda_layers(hub_names)
    return tuple("linear_attention" if i in kda else "full_attention" for i in range(num_layers))


def rules(config: ModelConfig, *, layout: Layout = "hub", fused: frozenset[str] = frozenset()) -> list[Rule]:
    """One rule for every tensor of a checkpoint of this model, in the order of the layers.

    Args:
        config: The model.
        layout: Spelling of the output projection of KDA layers.
        fused: Fused tensors that the checkpoint has, by hub name: `fused_names` finds them.
    """
    table = [
        whole("model.word_embeddings.weight", (config.vocab_size, config.hidden_size), "embed"),
    ]
    for i, (layer, (leaf, index)) in enumerate(zip(config.layer_plan, _places(config), strict=True)):
        builder = _Layer(config, f"model.layers.{i}", leaf, index, layout, fused)
        table += builder.norms()
        table += builder.kda() if layer.mixer == "linear" else builder.mla()
        table += builder.dense() if layer.ffn == "dense" else builder.moe()
    for k in range(config.num_mtp_layers):
        i = config.num_layers + k
        builder = _Layer(config, f"model.layers.{i}", f"mtp.{k}.block", (), layout, fused)
        table += builder.mtp(f"mtp.{k}")
        table += builder.norms()
        table += builder.mla()
        table += builder.dense() if config.mtp_plan.ffn == "dense" else builder.moe()
    table.append(whole("model.norm.weight", (config.hidden_size,), "final_norm"))
    table.append(linear("lm_head.weight", (config.hidden_size,), (config.vocab_size,), "head"))
    return table


def fused_names(hub_names: Iterator[str]) -> frozenset[str]:
    """The fused tensors among names: all experts of a layer, or the three convolutions of a KDA layer."""
    return frozenset(name for name in hub_names if name.endswith((EXPERTS_FUSED, CONV_FUSED)))


def fused_expert_names(config: ModelConfig) -> frozenset[str]:
    """Names that make `rules` write the experts of every layer together."""
    layers = range(config.num_layers + config.num_mtp_layers)
    return frozenset(f"model.layers.{i}{EXPERTS_FUSED}" for i in layers)


def _rename(name: str) -> str:
    for pattern, new in _RENAMES:
        name = pattern.sub(new, name)
    return name


def _kda_layers(hub_names: Iterable[str]) -> set[int]:
    """Layers with at least two tensors that only KDA has: one of them may be missing, and one of them may be astray."""
    counts = Counter(int(match[1]) for name in hub_names if (match := _KDA_ONLY.match(name)))
    return {layer for layer, count in counts.items() if count > 1}


def _places(config: ModelConfig) -> list[tuple[str, tuple[int, ...]]]:
    """Path of every main layer, and its index in the leading axes of the arrays there."""
    found: dict[int, tuple[str, tuple[int, ...]]] = {}
    for number, alike in enumerate(config.stack.alike):
        for layer, index in zip(alike.layers, np.ndindex(alike.stack_shape), strict=True):
            found[layer] = f"layers.{number}", index
    return [found[i] for i in range(config.num_layers)]


class _Layer:
    """Rules of one layer: checkpoint names below `name`, our arrays below `leaf` at `index`."""

    def __init__(
        self,
        config: ModelConfig,
        name: str,
        leaf: str,
        index: tuple[int, ...],
        layout: Layout,
        fused: frozenset[str],
    ):
        self.config = config
        self.name = name
        self.leaf = leaf
        self.index = index
        self.layout: Layout = layout
        self.fused = fused

    def norms(self) -> list[Rule]:
        return [
            self._vector("input_layernorm.weight", self.config.hidden_size, "mixer_norm"),
            self._vector("post_attention_layernorm.weight", self.config.hidden_size, "ffn_norm"),
        ]

    def mtp(self, leaf: str) -> list[Rule]:
        width = self.config.hidden_size
        return [
            whole(f"{self.name}.enorm.weight", (width,), f"{leaf}.embedding_norm"),
            whole(f"{self.name}.hnorm.weight", (width,), f"{leaf}.hidden_norm"),
            linear(f"{self.name}.eh_proj.weight", (2 * width,), (width,), f"{leaf}.merge"),
            whole(f"{self.name}.final_layernorm.weight", (width,), f"{leaf}.final_norm"),
        ]

    def kda(self) -> list[Rule]:
        kda, width = self.config.kda, self.config.hidden_size
        assert kda is not None
        heads, dim, taps = kda.num_heads, kda.head_dim, kda.conv_kernel_size
        out = "o_proj" if self.layout == "hub" else "dense"
        return [
            *(
                self._linear(f"attention.{x}_proj.weight", (width,), (heads, dim), f"mixer.{x}")
                for x in "qkv"
            ),
            self._linear("attention.f_proj.weight", (width,), (heads, dim), "mixer.forget"),
            self._linear("attention.g_proj.weight", (width,), (heads, dim), "mixer.gate"),
            self._linear("attention.b_proj.weight", (width,), (heads,), "mixer.beta"),
            *self._convolutions(heads * dim, taps),
            self._vector("attention.A_log", heads, "mixer.A_log"),
            self._reshaped("attention.dt_bias", (heads * dim,), "mixer.dt_bias"),
            self._vector("attention.o_norm.weight", dim, "mixer.out_norm"),
            self._linear(f"attention.{out}.weight", (heads, dim), (width,), "mixer.out"),
        ]

    def mla(self) -> list[Rule]:
        mla, width = self.config.mla, self.config.hidden_size
        assert mla is not None
        heads, nope, rope, value = mla.num_heads, mla.qk_nope_head_dim, mla.qk_rope_head_dim, mla.v_head_dim
        rank = mla.q_lora_rank
        query = [
            self._split(
                "attention.q_proj.weight", width, heads, {"mixer.query.nope": nope, "mixer.query.rope": rope}
            ),
        ]
        if rank is not None:
            query = [
                self._linear("attention.q_a_proj.weight", (width,), (rank,), "mixer.query.down"),
                self._vector("attention.q_a_layernorm.weight", rank, "mixer.query.norm"),
                self._split(
                    "attention.q_b_proj.weight",
                    rank,
                    heads,
                    {"mixer.query.nope": nope, "mixer.query.rope": rope},
                ),
            ]
        latent = mla.kv_lora_rank
        return [
            *query,
            self._linear("attention.kv_a_proj_with_mqa.weight", (width,), (latent + rope,), "mixer.kv_down"),
            self._vector("attention.kv_a_layernorm.weight", latent, "mixer.kv_norm"),
            self._split(
                "attention.kv_b_proj.weight", latent, heads, {"mixer.k_up": nope, "mixer.v_up": value}
            ),
            self._linear("attention.g_proj.weight", (width,), (heads,), "mixer.gate"),
            self._linear("attention.dense.weight", (heads, value), (width,), "mixer.out"),
        ]

    def dense(self) -> list[Rule]:
        size = self.config.intermediate_size
        assert size is not None
        return self._swiglu("mlp", size, "ffn")

    def moe(self) -> list[Rule]:
        moe, width = self.config.moe, self.config.hidden_size
        assert moe is not None
        table = [
            self._linear("mlp.gate.weight", (width,), (moe.num_experts,), "ffn.router.weight"),
            self._vector("mlp.gate.expert_bias", moe.num_experts, "ffn.router.router_bias"),
        ]
        table += self._fused_experts() if f"{self.name}{EXPERTS_FUSED}" in self.fused else self._experts()
        if moe.num_shared_experts:
            table += self._swiglu("mlp.shared_experts", moe.shared_intermediate_size, "ffn.shared")
        return table

    def _convolutions(self, channels: int, taps: int) -> list[Rule]:
        if f"{self.name}{CONV_FUSED}" not in self.fused:
            return [
                self._reshaped(f"attention.{x}_conv1d.weight", (channels, 1, taps), f"mixer.{x}_conv")
                for x in "qkv"
            ]
        return [
            Rule(
                name=f"{self.name}{CONV_FUSED}",
                shape=(3 * channels, 1, taps),
                view=(3 * channels, taps),
                sizes=(channels,) * 3,
                order=(0, 1),
                leaves=tuple(f"{self.leaf}.mixer.{x}_conv" for x in "qkv"),
                index=self.index,
            )
        ]

    def _experts(self) -> list[Rule]:
        moe, width = self.config.moe, self.config.hidden_size
        assert moe is not None
        size = moe.moe_intermediate_size
        table: list[Rule] = []
        for e in range(moe.num_experts):
            index = (*self.index, e)
            name, leaf = f"{self.name}.mlp.experts.{e}", f"{self.leaf}.ffn.experts"
            table += [
                linear(f"{name}.gate_proj.weight", (width,), (size,), f"{leaf}.gate", index=index),
                linear(f"{name}.up_proj.weight", (width,), (size,), f"{leaf}.up", index=index),
                linear(f"{name}.down_proj.weight", (size,), (width,), f"{leaf}.down", index=index),
            ]
        return table

    def _fused_experts(self) -> list[Rule]:
        moe, width = self.config.moe, self.config.hidden_size
        assert moe is not None
        num, size = moe.num_experts, moe.moe_intermediate_size
        name, leaf = f"{self.name}.mlp.experts", f"{self.leaf}.ffn.experts"
        return [
            Rule(
                name=f"{name}.gate_up_proj",
                shape=(num, 2 * size, width),
                view=(num, 2 * size, width),
                axis=1,
                sizes=(size, size),
                order=(0, 2, 1),
                leaves=(f"{leaf}.gate", f"{leaf}.up"),
                index=self.index,
            ),
            Rule(
                name=f"{name}.down_proj",
                shape=(num, width, size),
                view=(num, width, size),
                order=(0, 2, 1),
                leaves=(f"{leaf}.down",),
                index=self.index,
            ),
        ]

    def _swiglu(self, name: str, size: int, leaf: str) -> list[Rule]:
        width = self.config.hidden_size
        return [
            self._linear(f"{name}.gate_proj.weight", (width,), (size,), f"{leaf}.gate"),
            self._linear(f"{name}.up_proj.weight", (width,), (size,), f"{leaf}.up"),
            self._linear(f"{name}.down_proj.weight", (size,), (width,), f"{leaf}.down"),
        ]

    def _linear(self, name: str, rows: tuple[int, ...], columns: tuple[int, ...], leaf: str) -> Rule:
        return linear(f"{self.name}.{name}", rows, columns, f"{self.leaf}.{leaf}", index=self.index)

    def _split(self, name: str, rows: int, heads: int, parts: dict[str, int]) -> Rule:
        leaves = tuple(f"{self.leaf}.{leaf}" for leaf in parts)
        return split_linear(
            f"{self.name}.{name}", rows, heads, tuple(parts.values()), leaves, index=self.index
        )

    def _vector(self, name: str, size: int, leaf: str) -> Rule:
        return whole(f"{self.name}.{name}", (size,), f"{self.leaf}.{leaf}", index=self.index)

    def _reshaped(self, name: str, shape: tuple[int, ...], leaf: str) -> Rule:
        return whole(f"{self.name}.{name}", shape, f"{self.leaf}.{leaf}", index=self.index)
