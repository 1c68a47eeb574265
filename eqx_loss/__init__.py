"""Loss normalization as token weights: masks -> weights -> sums; objective and logs kept apart."""

import importlib
import types
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._api import *  # noqa: F403 (every name is public)
else:
    # JAX is loaded with the first name that is used: `eqx_loss.numpy` and `eqx_loss.compare` work without it.
    def __getattr__(name: str):
        if name.startswith("_") and name != "__all__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        public = _public()
        if name == "__all__":
            return sorted(public)
        if name not in public:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals().update(public)
        return public[name]

    def __dir__() -> list[str]:
        return sorted(_public())

    def _public() -> dict[str, object]:
        api = importlib.import_module("._api", __name__)
        # An import hook of jaxtyping adds a module of its own to what it loads.
        return {k: v for k, v in vars(api).items() if k[0] != "_" and not isinstance(v, types.ModuleType)}
