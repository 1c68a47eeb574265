"""The public API is frozen: a changed name or parameter is a decision, made in `public_api.txt`.

To accept a change: `python -m tests.eqx_loss.test_api > tests/eqx_loss/public_api.txt`.
"""

import enum
import importlib
import inspect
import pathlib

FROZEN = pathlib.Path(__file__).parent / "public_api.txt"
MODULES = ("eqx_loss", "eqx_loss.testing")


def _names(module) -> list[str]:
    if module.__name__ == "eqx_loss":
        return module.__all__
    return sorted(
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", "").startswith("eqx_loss")
    )


def _described(value: object) -> str:
    """Members of an enum, fields of a named tuple, parameter names and defaults of anything called."""
    if isinstance(value, type) and issubclass(value, enum.Enum):
        return "{" + ", ".join(member.name for member in value) + "}"
    if not callable(value):
        return ""
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return ""
    texts = []
    for parameter in parameters:
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        star = "*" if parameter.kind is parameter.KEYWORD_ONLY else ""
        texts.append(f"{star}{parameter.name}{default}")
    return "(" + ", ".join(texts) + ")"


def current_api() -> str:
    lines = []
    for name in MODULES:
        module = importlib.import_module(name)
        lines += [f"{name}.{entry}{_described(getattr(module, entry))}" for entry in _names(module)]
    return "\n".join(lines) + "\n"


def test_public_api_is_the_frozen_one():
    assert current_api() == FROZEN.read_text()


if __name__ == "__main__":
    print(current_api(), end="")
