"""Megatron's rolls and MTP loss, called the way each release has them. Needs torch and megatron-core."""

import inspect
import types
from typing import Any

import torch


def roll(mtp: Any, values: torch.Tensor, *, micro: dict[str, Any]) -> torch.Tensor:
    from megatron.core import parallel_state

    accepted = inspect.signature(mtp.roll_tensor).parameters
    options: dict[str, Any] = {}
    if "cp_group" in accepted:
        options["cp_group"] = parallel_state.get_context_parallel_group()
    if "packed_seq_params" in accepted:
        options["packed_seq_params"] = micro["packed"]
    return mtp.roll_tensor(values, shifts=-1, dims=-1, **options)[0]


def mtp_padding(mtp: Any, padding: torch.Tensor, micro: dict[str, Any]) -> torch.Tensor | None:
    """MTP layers see a padding mask where the release passes it on."""
    embeddings = getattr(mtp.MultiTokenPredictionLayer, "_get_embeddings", None)
    if embeddings is None or "padding_mask" not in inspect.signature(embeddings).parameters:
        return None
    return roll(mtp, padding, micro=micro)


def mtp_loss(model: Any, mtp: Any, states: list[torch.Tensor], micro: dict[str, Any]) -> torch.Tensor:
    """The decoder's output with Megatron's MTP loss attached."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_model import GPTModel

    joined = torch.cat(states, dim=0)
    cp_group = parallel_state.get_context_parallel_group()
    common: dict[str, Any] = {
        "hidden_states": joined,
        "labels": micro["labels"],
        "loss_mask": micro["loss_mask"],
        "packed_seq_params": micro["packed"],
    }
    if hasattr(mtp, "process_mtp_loss"):
        options = common | {
            "output_layer": _OutputLayer(model),
            "output_weight": None,
            "runtime_gather_output": None,
            "is_training": True,
            "compute_language_model_loss": model.cross_entropy,
            "config": model.config,
            "cp_group": cp_group,
            "tp_group": parallel_state.get_tensor_model_parallel_group(),
        }
        accepted = inspect.signature(mtp.process_mtp_loss).parameters
        return mtp.process_mtp_loss(**{k: v for k, v in options.items() if k in accepted})
    if "labels" not in inspect.signature(mtp.MultiTokenPredictionBlock.forward).parameters:
        return _through_postprocess(GPTModel, model, common, cp_group)
    return _through_block(mtp, model, states, micro)


class _OutputLayer:
    """A callable with the attributes of Megatron's output layer; keeps what it was given."""

    sequence_parallel = False

    def __init__(self, model: Any) -> None:
        self.weight = model.out
        self.given: list[torch.Tensor] = []
        self._model = model

    def __call__(self, hidden: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        self.given.append(hidden)
        return self._model.logits(hidden)


def _through_postprocess(owner: Any, model: Any, common: dict[str, Any], cp_group: Any) -> torch.Tensor:
    """0.14 to 0.16: `GPTModel._postprocess`, caught at its last call of the output layer."""
    layer = _OutputLayer(model)
    fake = types.SimpleNamespace(
        config=model.config,
        training=True,
        post_process=True,
        mtp_process=True,
        share_embeddings_and_output_weights=False,
        output_layer=layer,
        cp_group=cp_group,
        compute_language_model_loss=model.cross_entropy,
    )
    accepted = inspect.signature(owner._postprocess).parameters
    options = common | {
        "input_ids": None,
        "position_ids": None,
        "rotary_pos_emb": None,
        "rotary_pos_cos": None,
        "rotary_pos_sin": None,
        "mtp_in_postprocess": False,
    }
    owner._postprocess(fake, **{k: v for k, v in options.items() if k in accepted})
    return layer.given[-1]


def _through_block(mtp: Any, model: Any, states: list[torch.Tensor], micro: dict[str, Any]) -> torch.Tensor:
    """0.12 and 0.13: the loss is in `MultiTokenPredictionBlock.forward`."""
    fake = types.SimpleNamespace(
        layers=[lambda state=state, **_: state for state in states[1:]],
        config=model.config,
        training=True,
        mtp_loss_scaling_factor=model.config.mtp_loss_scaling_factor,
    )
    return mtp.MultiTokenPredictionBlock.forward(
        fake,
        input_ids=micro["tokens"],
        position_ids=micro["tokens"],
        hidden_states=states[0],
        attention_mask=None,
        labels=micro["labels"],
        loss_mask=micro["loss_mask"],
        embedding=lambda **_: None,
        output_layer=model.logits,
        output_weight=None,
        compute_language_model_loss=model.cross_entropy,
    )
