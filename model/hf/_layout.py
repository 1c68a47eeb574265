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
from ._layer_rules import CONV_FUSED, EXPERTS_FUSED, LayerRules
from ._rule import Rule, linear, whole

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
        builder = LayerRules(config, f"model.layers.{i}", leaf, index, layout, fused)
        table += builder.norms()
        table += builder.kda() if layer.mixer == "linear" else builder.mla()
        table += builder.dense() if layer.ffn == "dense" else builder.moe()
    for k in range(config.num_mtp_layers):
        i = config.num_layers + k
        builder = LayerRules(config, f"model.layers.{i}", f"mtp.{k}.block", (), layout, fused)
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
