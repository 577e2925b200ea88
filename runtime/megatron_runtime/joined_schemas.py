"""Finds the schemas that apply together to one object, so that closing one does not exclude what another one lists."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_runtime.schema_parts import OPEN, Schema, joins, listed_properties, subschemas, target

_ALTERNATIVES = ("anyOf", "oneOf")
_CONDITIONS = ("if", "not")
"""Keywords whose schemas describe what an object may not be, or need not be."""
_MAX_STEPS = 500_000
"""Schemas and properties that are read: many references to a large schema take time without a large grammar."""


class JoinedSchemas:
    """The objects of a schema that can be closed, and with which properties.

    An object is closed with the properties that all schemas for it list: its own, and those of ``allOf``, ``anyOf``,
    ``oneOf``, ``$ref``, ``then``, ``else`` and ``dependentSchemas`` beside them. It stays open if one of them says
    which other properties there are. Two schemas of one property that both list properties stay open.

    Raises:
        ValueError: The schema combines too many others.
    """

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._steps = 0
        self._open: set[int] = set()
        self._kept_open: set[int] = set()  # with all in them
        self._listed: dict[int, list[str]] = {}
        self._listing_nothing: set[int] = set()
        for part in subschemas(root):
            self._find_joins(part)

    def properties(self, part: Schema) -> list[str] | None:
        """The names of the properties that an object of this schema may have; None if the schema must not say so."""
        if id(part) in self._open or id(part) in self._kept_open or any(keyword in part for keyword in OPEN):
            return None
        if id(part) in self._listed:
            return self._listed[id(part)]
        return list(listed_properties(part)) if isinstance(part.get("properties"), Mapping) else None

    def _find_joins(self, part: Schema) -> None:
        for keyword in _CONDITIONS:
            if isinstance(part.get(keyword), Mapping):
                self._keep_open(part[keyword])
        if not joins(part):
            return
        groups = [
            [part],
            *([each for schema in group for each in self._joined(schema)] for group in self._groups(part)),
        ]
        names = [_names(group) for group in groups]
        listing = sum(map(bool, names))
        are_joined = bool(names[0]) or listing > 1
        for group, found in zip(groups[1:], names[1:], strict=True):
            if are_joined or (listing and not found):
                self._open |= {id(each) for each in group}
        if are_joined:
            if any(keyword in each for group in groups for each in group for keyword in (*OPEN, "patternProperties")):
                self._open.add(id(part))
            else:
                self._listed[id(part)] = list(dict.fromkeys(name for each in names for name in each))
        elif listing:
            self._open.add(id(part))  # One other schema lists all properties, and is closed itself.
        self._find_joined_values(groups)

    def _find_joined_values(self, groups: list[list[Schema]]) -> None:
        """Keeps the schemas of one value open if several groups list properties of it."""
        values: dict[str, list[list[Any]]] = {}
        for group in groups:
            found: dict[str, list[Any]] = {}
            for schema in group:
                for name, value in [*listed_properties(schema).items(), ("[]", schema.get("items"))]:
                    found.setdefault(name, []).append(value)
            for name, schemas in found.items():
                values.setdefault(name, []).append(schemas)
        for several in values.values():
            if len(several) > 1 and sum(any(map(self._lists_properties, schemas)) for schemas in several) > 1:
                for schema in (schema for schemas in several for schema in schemas):
                    self._keep_open(schema)

    def _groups(self, part: Schema) -> Iterator[list[Any]]:
        """The schemas that apply to the same object as this one; those of one group are alternatives."""
        if isinstance(members := part.get("allOf"), list):
            yield from ([member] for member in members)
        for keyword in _ALTERNATIVES:
            if isinstance(members := part.get(keyword), list):
                yield members
        yield [part.get("then"), part.get("else")]
        if isinstance(dependent := part.get("dependentSchemas"), Mapping):
            yield from ([schema] for schema in dependent.values())
        yield [target(part.get("$ref"), self._root)]

    def _joined(self, schema: Any) -> list[Schema]:
        """The schema and all that apply to the same object."""
        found: dict[int, Schema] = {}
        unread = [schema]
        while unread:
            part = unread.pop()
            if isinstance(part, Mapping) and id(part) not in found:
                self._count(1 + len(listed_properties(part)))
                found[id(part)] = part
                unread += [each for group in self._groups(part) for each in group]
        return list(found.values())

    def _keep_open(self, schema: Any) -> None:
        """Leaves the schema and all in it open, also what it refers to."""
        unread = [schema]
        while unread:
            for part in subschemas(unread.pop(), known=self._kept_open):
                self._count()
                self._kept_open.add(id(part))
                unread.append(target(part.get("$ref"), self._root))

    def _lists_properties(self, schema: Any) -> bool:
        """Whether the schema or one in it lists properties, also of what it refers to."""
        seen: list[int] = []
        unread = [schema]
        while unread:
            for part in subschemas(unread.pop(), known=self._listing_nothing):
                self._count()
                if listed_properties(part):
                    self._listing_nothing.difference_update(seen)
                    return True
                seen.append(id(part))
                self._listing_nothing.add(id(part))
                unread.append(target(part.get("$ref"), self._root))
        return False

    def _count(self, steps: int = 1) -> None:
        self._steps += steps
        if self._steps > _MAX_STEPS:
            raise ValueError("it combines too many schemas by allOf, anyOf, oneOf or $ref; list the properties")


def _names(schemas: list[Schema]) -> list[str]:
    return [name for schema in schemas for name in listed_properties(schema)]
