"""Limits of what users may ask of a grammar, beyond which llguidance takes time and memory out of all proportion."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, TypeGuard

from megatron_runtime.errors import InvalidRequestError
from megatron_runtime.schema_parts import Schema, joins, listed_properties

MAX_PROPERTIES = 1000
"""Properties of one object in a schema. If they are optional, the time grows with the square of their number."""
MAX_EXPRESSION_CHARACTERS = 32_768
"""A regular expression, or all patterns of a schema: up to 370 bytes a character while they are checked."""
MAX_UNICODE_CLASSES = 512
r"""Classes such as ``\p{L}`` in an expression, or in all of a schema: 6 KB each while they are checked."""
MAX_VALUES = 4096
"""Values of ``enum`` and ``const`` in a schema."""
MAX_TEXT_CHARACTERS = 16_384
"""One text that an answer must repeat: 440 bytes a character in the engine, once an answer has reached it."""
MAX_MULTIPLE = 10_000
"""``multipleOf`` without its decimal point: 500 bytes for each remainder in the engine. Those of a schema are added up,
or multiplied if they may apply to the same number."""

_APPLY_BESIDE = ("multipleOf", "properties", "patternProperties", "items", "prefixItems", "additionalProperties")
"""Keywords whose ``multipleOf`` apply together with those of a joined schema beside them."""
_UNICODE = re.compile(r"\\[pP]")
_UNICODE_UNLESS_ASCII = re.compile(r"\\[pPwWdDsSbB]")
_INLINE_SCHEMA = re.compile(r"%json\s*")


def check_schemas(schemas: Iterable[Any]) -> None:
    """Raises InvalidRequestError if the schemas of a grammar, or an object in one, are beyond a limit."""
    parts = list(_objects(schemas))
    for part in parts:
        _check_properties(part)
    _check_expressions("the patterns of the schema", list(_patterns(parts)))
    _check_values([value for part in parts for value in _values(part)])
    _check_multiples(parts)


def check_expression(pattern: str) -> None:
    """Raises InvalidRequestError for a regular expression that is beyond a limit."""
    _check_expressions("the expression", [pattern])


def check_lark(grammar: str) -> None:
    """Raises InvalidRequestError for a grammar in Lark's notation that is beyond a limit, or whose schemas are."""
    _check_classes("the grammar", len(_UNICODE_UNLESS_ASCII.findall(grammar)))
    check_schemas(_inline_schemas(grammar))


def check_texts(texts: Iterable[str]) -> None:
    """Raises InvalidRequestError if one of the texts is too long for a grammar."""
    longest = max(map(len, texts), default=0)
    if longest > MAX_TEXT_CHARACTERS:
        message = f"a text of {longest} characters is too long for a grammar; use at most {MAX_TEXT_CHARACTERS}"
        raise InvalidRequestError(message, field="grammar")


def _objects(schemas: Iterable[Any]) -> Iterator[Schema]:
    """All objects in the schemas, since a reference may use any of them as a schema."""
    unread = [*schemas]
    while unread:
        part = unread.pop()
        if isinstance(part, list):
            unread += part
        elif isinstance(part, Mapping):
            unread += part.values()
            yield part


def _check_properties(schema: Schema) -> None:
    properties = listed_properties(schema)
    if len(properties) > MAX_PROPERTIES:
        message = f"the schema has an object with {len(properties)} properties; use at most {MAX_PROPERTIES}"
        raise InvalidRequestError(message, field="grammar")
    check_texts(properties)


def _patterns(parts: Iterable[Schema]) -> Iterator[str]:
    for part in parts:
        if isinstance(pattern := part.get("pattern"), str):
            yield pattern
        if isinstance(by_pattern := part.get("patternProperties"), Mapping):
            yield from by_pattern


def _check_expressions(what: str, patterns: Sequence[str]) -> None:
    size = sum(map(len, patterns))
    if size > MAX_EXPRESSION_CHARACTERS:
        message = f"{what} can have at most {MAX_EXPRESSION_CHARACTERS} characters, not {size}"
        raise InvalidRequestError(message, field="grammar")
    _check_classes(what, sum(_unicode_classes(pattern) for pattern in patterns))


def _unicode_classes(pattern: str) -> int:
    """As ``ascii_classes`` leaves them."""
    return len((_UNICODE_UNLESS_ASCII if pattern.startswith("(?u)") else _UNICODE).findall(pattern))


def _check_classes(what: str, number: int) -> None:
    if number > MAX_UNICODE_CLASSES:
        limit = f"at most {MAX_UNICODE_CLASSES} Unicode classes, such as \\p{{L}}, not {number}"
        raise InvalidRequestError(f"{what} can have {limit}; use ASCII classes, such as [a-z]", field="grammar")


def _values(schema: Schema) -> list[Any]:
    values = schema.get("enum")
    return (values if isinstance(values, list) else []) + ([schema["const"]] if "const" in schema else [])


def _check_values(values: Sequence[Any]) -> None:
    if len(values) > MAX_VALUES:
        message = f"the schema can have at most {MAX_VALUES} values of 'enum' and 'const', not {len(values)}"
        raise InvalidRequestError(message, field="grammar")
    check_texts(_texts(values))


def _texts(values: Iterable[Any]) -> Iterator[str]:
    unread = [*values]
    while unread:
        value = unread.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            unread += [*value, *value.values()]
        elif isinstance(value, list):
            unread += value


def _check_multiples(parts: Sequence[Schema]) -> None:
    values = {value for part in parts if _is_finite(value := part.get("multipleOf"))}
    may_join = any("allOf" in part or (joins(part) and any(name in part for name in _APPLY_BESIDE)) for part in parts)
    costs = [_cost_of_multiple(value) for value in values]
    if (math.prod(costs) if may_join else sum(costs)) > MAX_MULTIPLE:
        how = "multiplied, since they may apply to one number" if may_join else "added up"
        message = f"the values of 'multipleOf' can be at most {MAX_MULTIPLE} without decimal points, {how}; leave out "
        raise InvalidRequestError(f"{message}{max(values)!s:.20}", field="grammar")


def _is_finite(value: Any) -> TypeGuard[float]:
    return type(value) is int or (type(value) is float and math.isfinite(value))


def _cost_of_multiple(value: float) -> int:
    """At least 1/500 of the bytes for the remainders; powers of ten times a digit have few that are different."""
    digits = "".join(map(str, Decimal(str(value)).as_tuple().digits)).rstrip("0") or "0"
    scaled = abs(int(value)) if value == int(value) else int(digits)
    return min(scaled, 100) if len(digits) == 1 else scaled


def _inline_schemas(grammar: str) -> Iterator[Any]:
    for place in _INLINE_SCHEMA.finditer(grammar):
        try:
            yield json.JSONDecoder().raw_decode(grammar, place.end())[0]
        except (ValueError, RecursionError):
            continue  # llguidance refuses it too
