"""The schema of the CustomResourceDefinition, for tests of its nodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_operator.api.crd import crd

VERSION = crd()["spec"]["versions"][0]
SCHEMA: dict[str, Any] = VERSION["schema"]["openAPIV3Schema"]
RULES = "x-kubernetes-validations"


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema inside ``schema``, with its path."""
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    if "items" in schema:
        yield from nodes(schema["items"], f"{path}[]")
