"""Typed access to a parsed `config.json` that collects every problem instead of stopping at the first."""

import math
from collections.abc import Mapping
from typing import Any, TypeGuard

# canonical name -> the other spellings of the same number
ALIASES: Mapping[str, tuple[str, ...]] = {
    "max_position_embeddings": ("model_max_length",),
    "norm_topk_prob": ("moe_renormalize",),
    "n_group": ("num_expert_group",),
    "num_experts_per_tok": ("num_experts_per_token",),
    "num_experts": ("num_local_experts",),
    "num_shared_experts": ("n_shared_experts",),
    "num_nextn_predict_layers": ("num_mtp_layers",),
    "short_conv_kernel_size": ("linear_conv_kernel_dim",),
}
# fields with one supported value: a file that says otherwise describes a model that we would compute wrongly
FIXED: Mapping[str, object] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "use_bias": False,
    "use_qkv_bias": False,
    "use_qk_norm": True,
    "use_mla_nope": False,
    "use_kda_lora": False,
    "no_kda_lora": True,
    "mtp_use_kda": False,
    "value_norm": False,
    "up_proj_norm": False,
    "scale_router_input": False,
    "score_function": "sigmoid",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "rope_interleave": True,
    "gated_attention_proj_granularity_type": "head_wise",
    "tie_word_embeddings": False,
    "quantization_config": None,
}


LARGEST = 2**31 - 1  # of any size; no array has a longer axis
ROPE_NAMES = ("rope_type", "type", "rope_theta", "partial_rotary_factor")  # the last has no effect on MLA


class Fields:
    """Typed access to a raw dict that collects problems instead of stopping at the first."""

    def __init__(self, raw: Mapping[str, object]):
        """Wrap a parsed `config.json`."""
        self.raw = raw
        self.problems: list[str] = []

    def get(self, name: str) -> object:
        """The value under any of its spellings; None when absent."""
        found = {alias: self.raw[alias] for alias in (name, *ALIASES.get(name, ())) if alias in self.raw}
        if len({repr(value) for value in found.values()}) > 1:
            self.problems.append(f"spellings of one field must agree, got {found}; remove the wrong one")
        return next(iter(found.values()), None)

    def integer(self, name: str, *, default: int | None = None, least: int = 0, most: int = LARGEST) -> int:
        """A whole number in `least` .. `most`; absent or null is `default`, a problem where there is none."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if _is_integer(value) and least <= value <= most:
            return value
        bound = f" and at most {most}" if _is_integer(value) and value > most else ""
        self.problems.append(f"{name} must be a whole number of at least {least}{bound}, got {value!r}")
        return max(least, 1)

    def optional_integer(self, name: str) -> int | None:
        """A whole number; None when absent or null."""
        return None if self.get(name) is None else self.integer(name)

    def number(self, name: str, *, default: float) -> float:
        """A finite number; absent or null is `default`."""
        value = self.get(name)
        if value is None:
            return default
        if not _is_number(value) or not abs(value) < math.inf:
            self.problems.append(f"{name} must be a finite number, got {value!r}")
            return default
        return float(value)

    def boolean(self, name: str, *, default: bool) -> bool:
        """True or false; absent or null is `default`."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.problems.append(f"{name} must be true or false, got {value!r}")
            return default
        return value

    def token_ids(self, name: str) -> int | tuple[int, ...] | None:
        """One token id, several, or None."""
        value = self.get(name)
        if isinstance(value, list) and all(_is_integer(item) and item >= 0 for item in value):
            return tuple(value)
        return self.optional_integer(name)

    def limits(self, name: str) -> tuple[float | None, ...] | None:
        """One clamp for each layer, None where there is none; None when absent."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(item is None or _is_number(item) for item in value):
            self.problems.append(f"{name} must be a list of numbers and nulls, one a layer, got {value!r}")
            return None
        return tuple(float(item) if item else None for item in value)  # 0 and null both mean "no limit"

    def kinds(self, name: str, num_layers: int, allowed: tuple[str, ...]) -> tuple[Any, ...] | None:
        """One of the `allowed` words for each layer; None when absent."""
        value = self.get(name)
        if value is None:
            return None
        if (
            not isinstance(value, list)
            or len(value) != num_layers
            or not all(item in allowed for item in value)
        ):
            self.problems.append(f"{name} must hold {num_layers} of {allowed}, got {value!r}")
            return None
        return tuple(value)

    def rope_theta(self) -> float:
        """Base of the rotary frequencies; a problem for every way of scaling positions."""
        parameters = self._rope("rope_parameters")
        self._rope("rope_scaling")
        if "rope_theta" not in parameters:
            return self.number("rope_theta", default=6_000_000.0)
        inner = Fields(parameters)
        theta = inner.number("rope_theta", default=6_000_000.0)
        self.problems += [f"rope_parameters.{problem}" for problem in inner.problems]
        return theta

    def _rope(self, name: str) -> Mapping[str, object]:
        """A group of rope fields that scales no position; empty when absent."""
        value = self.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            self.problems.append(f"{name} must be an object or null, got {value!r}; remove it")
            return {}
        kind = value.get("rope_type", value.get("type"))
        if kind is None and not all(key in ROPE_NAMES for key in value):
            # a scaling without its name, or one for each type of layers
            kind = sorted(set(value) - set(ROPE_NAMES))
        if kind not in (None, "default"):
            self.problems.append(
                f"{name}: rope_type must be 'default', got {kind!r}; position scaling is not computed"
            )
        return value

    def check_fixed(self) -> None:
        """A problem for every field of `FIXED` that has another value."""
        for name, wanted in FIXED.items():
            if name in self.raw and self.raw[name] is not None and self.raw[name] != wanted:
                self.problems.append(
                    f"{name} must be {wanted!r}, got {self.raw[name]!r}; this model does not compute it"
                )

    def check_heads(self, num_heads: int) -> None:
        """A problem for every other count of heads: the model has one for all."""
        for name in ("num_key_value_heads", "linear_num_heads"):
            value = self.raw.get(name)
            if value is not None and value != num_heads:
                self.problems.append(f"{name} must equal num_attention_heads={num_heads}, got {value!r}")


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
