"""The fields of a checkpoint's ``config.json``, read with errors that name them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_runtime.errors import CheckpointError

MISSING = object()
"""As a default: the field is required."""

_KINDS: dict[type, str] = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
    dict: "an object",
    list: "a list",
}


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError with the file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read ({error.strerror}). Check the path and its permissions") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: is not JSON ({error}). Fetch the file again") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: holds a {type(found).__name__}, expected a JSON object. Fetch the file again")
    return found


class ConfigFields:
    """The fields of a JSON object, with errors that name the file, the field and the value."""

    def __init__(self, path: Path, fields: dict[str, Any]) -> None:
        self.path = path
        self._fields = fields

    def get(self, name: str, default: Any, kind: type) -> Any:
        """The field, or ``default`` when it is absent or null; integers are accepted for float fields."""
        value = self._fields.get(name)
        if value is None:
            if default is MISSING:
                raise CheckpointError(f"{self.path}: {name} is missing, expected {_KINDS[kind]}. Fetch the file again")
            return default
        if kind is float and type(value) is int:
            return float(value)
        if type(value) is not kind:
            raise CheckpointError(f"{self.path}: {name} is {value!r}, expected {_KINDS[kind]}. Fetch the file again")
        return value

    def positive(self, name: str, default: Any) -> Any:
        """A number above zero, or ``default`` when it is absent or null."""
        value = self.get(name, default, float)
        if value is not None and not 0.0 < value < float("inf"):
            raise CheckpointError(f"{self.path}: {name} is {value}, expected a number above 0. Fetch the file again")
        return value

    def switch(self, name: str, default: bool) -> bool:
        """A boolean, which some files write as a number, or ``default`` when it is absent or null."""
        value = self._fields.get(name)
        return value != 0 if type(value) in (int, float) else bool(self.get(name, default, bool))

    def numbers(self, name: str, kind: type) -> tuple[Any, ...]:
        """A list of numbers of ``kind``; empty when it is absent or null."""
        listed = self.get(name, [], list)
        return tuple(ConfigFields(self.path, {name: value}).get(name, MISSING, kind) for value in listed)

    def or_else(self, defaults: dict[str, Any]) -> ConfigFields:
        """The same fields, with ``defaults`` for absent or null ones."""
        return ConfigFields(self.path, defaults | {name: v for name, v in self._fields.items() if v is not None})

    def but(self, **changed: Any) -> ConfigFields:
        """The same fields, with the values of those in ``changed`` replaced."""
        return ConfigFields(self.path, self._fields | changed)

    def within(self, *names: str) -> ConfigFields:
        """The fields of the first non-empty object among ``names``; empty when all are absent, null or empty."""
        found = (self.get(name, {}, dict) for name in names)
        return ConfigFields(self.path, next(filter(None, found), {}))

    def refuse(self, name: str, supported: Any) -> None:
        """Raise CheckpointError when the field is neither absent, null nor ``supported``."""
        value = self._fields.get(name)
        if value is not None and value != supported:
            named = "null" if supported is None else repr(supported)
            raise CheckpointError(f"{self.path}: {name} is {value!r}, only {named} is supported. Choose another model")
