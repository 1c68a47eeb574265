"""The common part of both importers: rules from a foreign key to a place in our configuration."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

Convert = Callable[[Any], Any]


class CannotExpressError(ValueError):
    """A foreign value that our configuration has no word for; the message says why."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Imported:
    """A translated configuration.

    Attributes:
        tree: Our configuration as nested mappings, sections first.
        dropped: `key=value: reason` of every setting that was not carried over.
        remarks: What a reader should know about what was.
    """

    tree: dict[str, Any]
    dropped: tuple[str, ...]
    remarks: tuple[str, ...]


class Translation:
    """A tree under construction. Used inside one function call only."""

    def __init__(self, keys: Mapping[str, Any]) -> None:
        self.keys = keys
        self.tree: dict[str, Any] = {}
        self.dropped: list[str] = []
        self.remarks: list[str] = []
        self._used: set[str] = set()

    def take(self, name: str, convert: Convert, default: Any = None) -> Any:
        """The converted value of a key, which then counts as honoured; `default` if it is absent.

        A value that cannot be converted is listed, and `default` is returned.
        """
        if name not in self.keys:
            return default
        self._used.add(name)
        try:
            return convert(self.keys[name])
        except (CannotExpressError, ValueError, TypeError, OverflowError) as error:
            self.drop(name, str(error))
            return default

    def put(self, path: str, value: Any) -> None:
        """Sets `section.key` unless the value is None."""
        if value is None:
            return
        *sections, last = path.split(".")
        node = self.tree
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = value

    def drop(self, name: str, reason: str) -> None:
        self._used.add(name)
        self.dropped.append(f"{name}={self.keys[name]}: {reason}")

    def finish(self) -> Imported:
        """Lists every key that no rule has looked at."""
        for name in self.keys:
            if name not in self._used:
                self.drop(name, "no counterpart")
        return Imported(tree=self.tree, dropped=tuple(self.dropped), remarks=tuple(self.remarks))


def translate(
    keys: Mapping[str, Any], rules: Mapping[str, tuple[str, Convert]], fixed: Mapping[str, Convert]
) -> Translation:
    """A translation that has carried over every key with a plain rule.

    Args:
        keys: Foreign settings.
        rules: Foreign name to (our path, converter).
        fixed: Settings without a switch here: accepted where they say what our code always does.
    """
    translation = Translation(keys)
    for name, (path, convert) in rules.items():
        translation.put(path, translation.take(name, convert))
    for name, convert in fixed.items():
        translation.take(name, convert)
    return translation


def integer(value: Any) -> int:
    if isinstance(value, bool):
        raise ValueError("must be an integer")
    number = float(str(value).replace("_", ""))
    if number != int(number):
        raise ValueError("must be an integer")
    return int(number)


def real(value: Any) -> float:
    if isinstance(value, bool):
        raise ValueError("must be a number")
    return float(str(value).replace("_", ""))


def flag(value: Any) -> bool:
    """True, False, or their spellings; a flag without a value is True."""
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text in ("", "true", "yes", "on", "1"):
        return True
    if text in ("false", "no", "off", "0"):
        return False
    raise ValueError("must be true or false")


def only(*allowed: Any, reason: str) -> Convert:
    """A converter that accepts the given values (compared as lower-case text) and yields None.

    For settings that our code has no switch for because it always does the same.
    """

    def convert(value: Any) -> None:
        if str(value).strip().lower() not in {str(entry).lower() for entry in allowed}:
            raise CannotExpressError(reason)

    return convert
