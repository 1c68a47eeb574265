"""The rules of one layer of Ling-3, part by part, in hub names."""

from .._config import ModelConfig
from ._hf_config import Layout
from ._rule import Rule, linear, split_linear, whole

EXPERTS_FUSED = ".mlp.experts.gate_up_proj"
CONV_FUSED = ".attention.conv1d.weight"


class LayerRules:
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
        """`layout` and `fused` as for `rules`."""
        self.config = config
        self.name = name
        self.leaf = leaf
        self.index = index
        self.layout: Layout = layout
        self.fused = fused

    def norms(self) -> list[Rule]:
        """Of both norms."""
        return [
            self._vector("input_layernorm.weight", self.config.hidden_size, "mixer_norm"),
            self._vector("post_attention_layernorm.weight", self.config.hidden_size, "ffn_norm"),
        ]

    def mtp(self, leaf: str) -> list[Rule]:
        """Of what an MTP depth has beside its block, our arrays below `leaf`."""
        width = self.config.hidden_size
        return [
            whole(f"{self.name}.enorm.weight", (width,), f"{leaf}.embedding_norm"),
            whole(f"{self.name}.hnorm.weight", (width,), f"{leaf}.hidden_norm"),
            linear(f"{self.name}.eh_proj.weight", (2 * width,), (width,), f"{leaf}.merge"),
            whole(f"{self.name}.final_layernorm.weight", (width,), f"{leaf}.final_norm"),
        ]

    def kda(self) -> list[Rule]:
        """Of a KDA mixer."""
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
        """Of an MLA mixer."""
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
        """Of a dense ffn."""
        size = self.config.intermediate_size
        assert size is not None
        return self._swiglu("mlp", size, "ffn")

    def moe(self) -> list[Rule]:
        """Of router and experts."""
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
