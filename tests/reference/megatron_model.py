"""The toy model on one rank, with Megatron's routers and MTP loss. Needs torch and megatron-core."""

import functools
import inspect
import types
from typing import Any

import torch

from .megatron_mtp import mtp_loss, mtp_padding, roll
from .settings import Setting, parameters


class ToyModel(torch.nn.Module):
    """The toy model on one rank; MTP loss, router and their losses are Megatron's."""

    def __init__(self, config: Any, setting: Setting, channel: str) -> None:
        super().__init__()
        from megatron.core.enums import ModelType

        self.config = config
        self.model_type = ModelType.encoder_or_decoder
        self.setting = setting
        self.channel = channel
        self.tokens: dict[str, list[Any]] = {}
        for name, value in parameters(setting).items():
            if not name.endswith(".router"):
                tensor = torch.tensor(value, dtype=torch.float64)
                self.register_parameter(name.replace(".", "_"), torch.nn.Parameter(tensor))
        self.routers = torch.nn.ModuleDict()
        if setting.moe:
            for index in range(setting.num_layers):
                self.routers[f"dec{index}"] = _router(config, setting, f"dec{index}", index + 1, False)
            for index in range(setting.mtp_layers):
                self.routers[f"mtp{index}"] = _router(config, setting, f"mtp{index}", index + 1, True)

    def set_input_tensor(self, tensor: Any) -> None:
        """Part of the schedule's protocol; there is one pipeline stage."""

    def forward(self, micro: dict[str, Any]) -> torch.Tensor:
        """Per-token cross-entropy `[b, s]`, the MTP loss attached."""
        from megatron.core.transformer import multi_token_prediction as mtp

        hidden = self.embed[micro["tokens"]].transpose(0, 1).contiguous()
        padding = micro["padding"]
        for index in range(self.setting.num_layers):
            hidden = self._layer(f"dec{index}", hidden, padding)
        if not self.setting.mtp_layers:
            return self.cross_entropy(micro["labels"], self.logits(hidden)[0], micro, "ce0")
        states, tokens = [hidden], micro["tokens"]
        shift = functools.partial(roll, mtp, micro=micro)
        for index in range(self.setting.mtp_layers):
            tokens = shift(tokens)
            if padding is not None:
                padding = mtp_padding(mtp, padding, micro)
            both = torch.cat([self.embed[tokens].transpose(0, 1), states[-1]], dim=-1)
            states.append(self._layer(f"mtp{index}", both @ getattr(self, f"mtp{index}_proj").T, padding))
        if self.channel in ("total", "mtp"):
            hidden = mtp_loss(self, mtp, states, micro)
        else:  # the MTP routers still take part; a scale of 0 would not do, Megatron has 0 / 0 there
            hidden = states[0] + sum(0.0 * state for state in states[1:])
        _record_mtp(self, states, shift, micro)
        return self.cross_entropy(micro["labels"], self.logits(hidden)[0], micro, "ce0")

    def _layer(self, name: str, hidden: torch.Tensor, padding: torch.Tensor | None) -> torch.Tensor:
        hidden = hidden + torch.tanh(hidden @ getattr(self, f"{name}_w").T)
        if not self.setting.moe:
            return hidden
        router = self.routers[name]
        shown = padding is not None and shows_padding()
        mask = {"padding_mask": padding.transpose(0, 1).contiguous()} if shown else {}
        probs, _ = router(hidden, **mask)
        return hidden + (probs @ getattr(self, f"{name}_experts")).view(hidden.shape)

    def logits(self, hidden: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        return hidden @ self.out.T, None

    def cross_entropy(
        self, labels: torch.Tensor, logits: torch.Tensor, micro: dict[str, Any] | None = None, name: str = ""
    ) -> torch.Tensor:
        flat = torch.nn.functional.cross_entropy(
            logits.transpose(0, 1).reshape(-1, logits.shape[-1]), labels.reshape(-1), reduction="none"
        )
        loss = flat.view(labels.shape)
        if micro is not None:
            self.record(name, loss, micro)
        return loss

    def record(self, name: str, values: torch.Tensor, micro: dict[str, Any]) -> None:
        """Keeps per-token values for the golden file."""
        piece = (micro["rows"], micro["places"], values.detach().numpy())
        self.tokens.setdefault(name, []).append(piece)


def _router(config: Any, setting: Setting, name: str, number: int, is_mtp: bool) -> torch.nn.Module:
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe.router import TopKRouter

    if not hasattr(moe_utils, "te_general_gemm"):  # 0.16 forgets to define it without Transformer Engine
        moe_utils.te_general_gemm = None
    accepted = inspect.signature(TopKRouter.__init__).parameters
    groups: dict[str, Any] = {}
    for key in ("pg_collection", "model_comm_pgs"):
        if key in accepted:
            groups[key] = _process_groups()
    router = TopKRouter(config=config, **groups)
    router.weight = torch.nn.Parameter(
        torch.tensor(parameters(setting)[f"{name}.router"], dtype=torch.float64)
    )
    if hasattr(router, "is_mtp_layer"):
        router.is_mtp_layer = is_mtp
    elif is_mtp:
        number = number + setting.num_layers if _counts_mtp_layers() else 1
    router.set_layer_number(number)
    return router


def shows_padding() -> bool:
    """False before 0.16: routers take no padding mask."""
    from megatron.core.transformer.moe.router import TopKRouter

    return "padding_mask" in inspect.signature(TopKRouter.forward).parameters


def _counts_mtp_layers() -> bool:
    """0.12 writes MTP layers into the slot of layer 1."""
    import megatron.core

    return not megatron.core.__version__.startswith("0.12")


def _process_groups() -> Any:
    from megatron.core import parallel_state as state

    return types.SimpleNamespace(
        tp=state.get_tensor_model_parallel_group(),
        cp=state.get_context_parallel_group(),
        tp_cp=state.get_tensor_and_context_parallel_group(),
        tp_dp_cp=state.get_tensor_and_data_parallel_group(with_context_parallel=True),
    )


def _record_mtp(model: ToyModel, states: list[torch.Tensor], roll: Any, micro: dict[str, Any]) -> None:
    labels, mask = micro["labels"], micro["loss_mask"]
    for depth, state in enumerate(states[1:], 1):
        labels, mask = roll(labels), roll(mask)
        model.cross_entropy(labels, model.logits(state)[0], micro, f"ce{depth}")
        model.record(f"mask{depth}", mask, micro)
