"""Where a JSON schema has further schemas, and what its references stand for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

Schema = Mapping[str, Any]

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
JOINS = ("allOf", "anyOf", "oneOf", "$ref", "if", "dependentSchemas")
"""Keywords whose schemas apply to the same object as ``properties`` beside them."""
OPEN = ("additionalProperties", "unevaluatedProperties")
"""Keywords that say which other properties an object may have."""

MAX_REFERENCES = 16


def joins(schema: Schema) -> list[str]:
    """The keywords that apply further schemas to the same object."""
    return [keyword for keyword in JOINS if keyword in schema]


def listed_properties(schema: Schema) -> Schema:
    """The schemas of an object's properties, by name."""
    found = schema.get("properties")
    return found if isinstance(found, Mapping) else {}


def target(reference: object, root: Schema) -> Schema | None:
    """The schema in ``root`` that a ``$ref`` stands for; None if there is none."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found: Any = root
    for name in reference.removeprefix("#").strip("/").split("/") if reference != "#" else ():
        found = found.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else None


def resolved(schema: Any, root: Schema) -> Schema:
    """The schema without references into ``root`` at its top; empty for what can't be resolved."""
    for _ in range(MAX_REFERENCES):
        if not isinstance(schema, Mapping):
            return {}
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#"):
            return schema
        schema = target(reference, root)
    return {}


def subschemas(schema: Any, *, known: Collection[int] = ()) -> Iterator[Schema]:
    """The schema and all in it, without those whose ``id`` is known; values, such as those of ``const``, are none."""
    unread: list[Any] = [schema]
    while unread:
        part = unread.pop()
        if not isinstance(part, Mapping) or id(part) in known:
            continue
        yield part
        unread += [each for keyword in _BY_NAME if isinstance(by := part.get(keyword), Mapping) for each in by.values()]
        unread += [each for keyword in _IN_LISTS if isinstance(some := part.get(keyword), list) for each in some]
        unread += [part[keyword] for keyword in _SINGLE if keyword in part]


def mapped(schema: Any, change: Callable[[Schema], dict[str, Any]]) -> Any:
    """The schema after a change of each schema in it, from the outside to the inside."""
    if not isinstance(schema, Mapping):
        return schema
    found = change(schema)
    for keyword in _BY_NAME:
        if isinstance(by_name := found.get(keyword), Mapping):
            found[keyword] = {name: mapped(each, change) for name, each in by_name.items()}
    for keyword in {*_IN_LISTS, *_SINGLE} & found.keys():
        value = found[keyword]
        found[keyword] = [mapped(each, change) for each in value] if isinstance(value, list) else mapped(value, change)
    return found
