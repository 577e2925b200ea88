"""Prepares JSON schemas and patterns of users for ``guides``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_runtime.errors import InvalidRequestError
from megatron_runtime.joined_schemas import JoinedSchemas
from megatron_runtime.schema_parts import JOINS, MAX_REFERENCES, OPEN, Schema, listed_properties, mapped, resolved

_ASCII = {"d": "0-9", "w": "A-Za-z0-9_", "s": r"\t\n\f\r\x0b "}


def prepared_schema(schema: Schema) -> dict[str, Any]:
    """A schema whose objects have only the properties that it lists, and whose patterns are ASCII.

    An object with ``properties`` gets ``additionalProperties: false`` unless it says otherwise; ``JoinedSchemas`` says
    which properties it has if other schemas apply to it too.

    Raises:
        ValueError: The schema combines too many others.
    """
    objects = JoinedSchemas(schema)

    def prepare(part: Schema) -> dict[str, Any]:
        found = dict(part)
        if isinstance(pattern := part.get("pattern"), str):
            found["pattern"] = ascii_classes(pattern)
        if isinstance(by_pattern := part.get("patternProperties"), Mapping):
            found["patternProperties"] = {ascii_classes(pattern): each for pattern, each in by_pattern.items()}
        names = objects.properties(part)
        if names is not None:
            found["properties"] = {name: {} for name in names} | dict(listed_properties(part))
            found["additionalProperties"] = False
        return found

    prepared: dict[str, Any] = mapped(schema, prepare)
    return prepared


def closed_parameters(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a function; without any information about properties there are none.

    Raises:
        InvalidRequestError: A parameter that is required is not listed.
    """
    if any(keyword in schema for keyword in (*JOINS, *OPEN, "patternProperties")):
        return dict(schema)
    required, listed = schema.get("required"), listed_properties(schema)
    for name in required if isinstance(required, list) else ():
        if isinstance(name, str) and name not in listed:
            message = f"'required' names {name!r}, which 'properties' does not list; add it there, or leave it out"
            raise InvalidRequestError(message, field="grammar")
    return {"properties": {}, **schema}


def value_types(schema: Any, root: Mapping[str, Any], *, depth: int = 0) -> frozenset[str]:
    """The JSON types that a schema allows; string if it names none."""
    known = resolved(schema, root)
    kinds = known.get("type")
    if isinstance(kinds, list):
        return frozenset(str(kind) for kind in kinds)
    if isinstance(kinds, str):
        return frozenset({kinds})
    values = known.get("enum", [known["const"]] if "const" in known else None)
    if isinstance(values, list) and values:
        return frozenset(_type_of(value) for value in values)
    branches = [branch for keyword in ("anyOf", "oneOf", "allOf") for branch in known.get(keyword, ())]
    if not branches or depth == MAX_REFERENCES:
        return frozenset({"string"})
    return frozenset().union(*(value_types(branch, root, depth=depth + 1) for branch in branches))


def _type_of(value: Any) -> str:
    kinds = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null", list: "array"}
    return kinds.get(type(value), "object")


def ascii_classes(pattern: str) -> str:
    r"""The regular expression with ASCII's ``\d``, ``\w`` and ``\s``, unless it begins with ``(?u)``."""
    if pattern.startswith("(?u)"):
        return pattern
    found, depth, index = [], 0, 0
    while index < len(pattern):
        piece = pattern[index : index + 2] if pattern[index] == "\\" else pattern[index]
        index += len(piece)
        if piece == "[":
            depth += 1
            # A bracket at the start of a class is a character of it.
            start = next((start for start in ("^]", "]", "^") if pattern.startswith(start, index)), "")
            piece += start
            index += len(start)
        elif piece == "]":
            depth = max(0, depth - 1)
        elif piece[0] == "\\" and piece[1:].lower() in _ASCII:
            piece = _ascii_class(piece[1], is_in_class=depth > 0)
        found.append(piece)
    return "".join(found)


def _ascii_class(letter: str, *, is_in_class: bool) -> str:
    characters = _ASCII[letter.lower()]
    if letter.isupper():
        return f"[^{characters}]"
    return characters if is_in_class else f"[{characters}]"
