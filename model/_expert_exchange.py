"""How tokens meet their experts on a mesh that holds experts apart, and what either way sends."""

import dataclasses
from typing import Literal

ExchangeKind = Literal["tokens", "weights"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertExchange:
    """What travels along the expert axis.

    Attributes:
        kind: `tokens`: copies of tokens travel to the devices of their experts and back. `weights`: experts visit
            every device in turn and their gradients travel home with them. `auto`: what sends fewer bytes.
        buffer: Rows that a device receives at most, as a multiple of the even share (copies of one device's tokens);
            copies beyond it are dropped and counted. None has room for whatever the routers do. Of `tokens` only.
        token_trips: How often a copy travels in a forward and a backward pass: 4, and once more where
            rematerialization sends it again.
        expert_cuts: Devices that share the matrices of one expert without the model's knowledge (the tensor axis).
    """

    kind: Literal["auto", "tokens", "weights"] = "auto"
    buffer: float | None = None
    token_trips: int = 4
    expert_cuts: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExchangeWork:
    """Sizes that decide what travels: those of one layer of experts in one micro-step.

    Attributes:
        num_tokens: Of one device.
        num_chosen: Experts of a token.
        num_experts: Of all devices together.
        num_devices: Along the expert axis.
        model_size: D.
        expert_size: F.
        compute_bytes: Of a number of a travelling token.
        gather_bytes: Of a number of a travelling weight.
        reduce_bytes: Of a number of a travelling gradient of a weight.
    """

    num_tokens: int
    num_chosen: int
    num_experts: int
    num_devices: int
    model_size: int
    expert_size: int
    compute_bytes: int
    gather_bytes: int
    reduce_bytes: int

    @property
    def num_copies(self) -> int:
        """Copies of a device's tokens: as many as a device receives when all experts are chosen equally often."""
        return self.num_tokens * self.num_chosen

    @property
    def block_rows(self) -> int:
        """Most copies that one device can send to another: a token goes to each expert at most once."""
        return self.num_tokens * min(self.num_chosen, self.num_experts // self.num_devices)

    def buffer_rows(self, buffer: float | None) -> int:
        """Most copies that a device receives: `buffer` times `num_copies` (rounded), or all that may come."""
        most = self.num_devices * self.block_rows
        return most if buffer is None else min(most, round(buffer * self.num_copies))

    def token_bytes(self, exchange: ExpertExchange) -> int:
        """Bytes a device sends when tokens travel, all experts chosen equally often.

        `trips * T * A * D * (n - 1) / n` numbers.
        """
        numbers = self.num_copies * self.model_size * (self.num_devices - 1) // self.num_devices
        return exchange.token_trips * numbers * self.compute_bytes

    def weight_bytes(self, exchange: ExpertExchange) -> int:
        """Bytes a device sends when experts travel: forward, backward, and with them their gradients.

        `(n - 1) * 3 * (E / n) * D * F` numbers each way.
        """
        numbers = 3 * self.num_experts // self.num_devices * self.model_size * self.expert_size
        width = 2 * self.gather_bytes + self.reduce_bytes
        return (self.num_devices - 1) * numbers // exchange.expert_cuts * width

    def choose(self, exchange: ExpertExchange) -> ExchangeKind:
        """What travels: as `exchange.kind` says, and for `auto` what sends fewer bytes, tokens when equal."""
        if exchange.kind != "auto":
            return exchange.kind
        return "weights" if self.weight_bytes(exchange) < self.token_bytes(exchange) else "tokens"

    def describe(self, exchange: ExpertExchange) -> str:
        """The choice with its reason in words, bytes in MB."""
        tokens, weights = (
            f"{size / 1e6:.3g} MB" for size in (self.token_bytes(exchange), self.weight_bytes(exchange))
        )
        if self.choose(exchange) == "weights":
            return f"experts travel ({weights} a device, layer and micro-step; tokens: {tokens})"
        rows = self.buffer_rows(exchange.buffer)
        return (
            f"tokens travel to experts ({tokens} a device, layer and micro-step; experts: {weights}),"
            f" room for {rows / self.num_copies:.3g} x the even share"
        )
