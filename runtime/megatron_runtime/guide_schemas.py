"""Prepares JSON schemas and patterns of users for ``guides``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_IN_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SINGLE = (
    "items",
    "additionalItems",
    "additionalProperties",
    "unevaluatedItems",
    "unevaluatedProperties",
    "contains",
    "propertyNames",
    "not",
    "if",
    "then",
    "else",
)
_JOINS = ("allOf", "anyOf", "oneOf", "$ref", "if", "dependentSchemas")
"""Keywords whose schemas apply to the same object as ``properties`` beside them."""
OPEN = ("additionalProperties", "unevaluatedProperties")
"""Keywords that say which other properties an object may have."""

_MAX_REFERENCES = 16
_ASCII = {"d": "0-9", "w": "A-Za-z0-9_", "s": r"\t\n\f\r\x0b "}


def prepared_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema whose objects have only the properties that it lists, and whose patterns are ASCII.

    An object with ``properties`` gets ``additionalProperties: false`` unless it says otherwise. If anywhere two schemas
    apply to one object, as with ``allOf``, or a schema is negated, all objects stay as they are: closing one of the
    schemas would exclude the properties of the other.
    """
    closes = not any(map(_is_joined, _subschemas(schema)))

    def prepare(part: Mapping[str, Any]) -> dict[str, Any]:
        found = dict(part)
        if isinstance(pattern := part.get("pattern"), str):
            found["pattern"] = ascii_classes(pattern)
        if isinstance(by_pattern := part.get("patternProperties"), Mapping):
            found["patternProperties"] = {ascii_classes(pattern): each for pattern, each in by_pattern.items()}
        if closes and "properties" in part and not any(keyword in part for keyword in OPEN):
            found["additionalProperties"] = False
        return found

    prepared: dict[str, Any] = _mapped(schema, prepare)
    return prepared


def closed_parameters(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a function; without any information about properties there are none."""
    says_something = any(keyword in schema for keyword in (*_JOINS, *OPEN, "patternProperties"))
    return dict(schema) if says_something else {"properties": {}, **schema}


def joins(schema: Mapping[str, Any]) -> list[str]:
    """The keywords that apply further schemas to the same object."""
    return [keyword for keyword in _JOINS if keyword in schema]


def resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema without references into ``root`` at its top; empty for what can't be resolved."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, Mapping):
            return {}
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#"):
            return schema
        schema = root
        for name in reference.removeprefix("#").strip("/").split("/") if reference != "#" else ():
            schema = schema.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(schema, Mapping) else None
    return {}


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
    if not branches or depth == _MAX_REFERENCES:
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


def _is_joined(schema: Mapping[str, Any]) -> bool:
    joined = joins(schema)
    several = isinstance(members := schema.get("allOf"), list) and len(members) > 1
    return "not" in schema or "if" in schema or several or len(joined) + ("properties" in schema) > 1


def _subschemas(schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The schema and all in it; values, such as those of ``const``, are none."""
    unread: list[Any] = [schema]
    while unread:
        part = unread.pop()
        if not isinstance(part, Mapping):
            continue
        yield part
        unread += [each for keyword in _BY_NAME if isinstance(by := part.get(keyword), Mapping) for each in by.values()]
        unread += [each for keyword in _IN_LISTS if isinstance(some := part.get(keyword), list) for each in some]
        unread += [part[keyword] for keyword in _SINGLE if keyword in part]


def _mapped(schema: Any, change: Callable[[Mapping[str, Any]], dict[str, Any]]) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    found = change(schema)
    for keyword in _BY_NAME:
        if isinstance(by_name := found.get(keyword), Mapping):
            found[keyword] = {name: _mapped(each, change) for name, each in by_name.items()}
    for keyword in {*_IN_LISTS, *_SINGLE} & found.keys():
        value = found[keyword]
        found[keyword] = (
            [_mapped(each, change) for each in value] if isinstance(value, list) else _mapped(value, change)
        )
    return found
