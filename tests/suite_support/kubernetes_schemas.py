"""Validates objects of built-in kinds with the strict schemas of each supported version of Kubernetes."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any

import jsonschema
from kubernetes_validate.utils import SchemaNotFoundError, schema_contents
from referencing import Registry, Resource

VERSIONS = tuple(f"1.{minor}" for minor in range(28, 38))
_VALID: set[tuple[str, str]] = set()
"""Versions and objects that were valid: many tests render the same objects."""


def check(obj: Mapping[str, Any], versions: Iterable[str] = VERSIONS) -> None:
    """Raises SchemaNotFoundError, or jsonschema.ValidationError for an invalid or unknown field."""
    content = repr(obj)
    for version in versions:
        if (version, content) in _VALID:
            continue
        try:
            _validator(version, obj["apiVersion"], obj["kind"]).validate(obj)
            _VALID.add((version, content))
        except jsonschema.ValidationError as error:
            error.message = f"Kubernetes {version}, {obj['kind']} {obj['metadata']['name']}: {error.message}"
            raise


@functools.cache
def _validator(version: str, api_version: str, kind: str) -> jsonschema.Draft202012Validator:
    group = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", api_version)
    try:
        schema = schema_contents(f"{_folder(version)}/{kind.lower()}-{group}.json", version)
    except FileNotFoundError:
        raise SchemaNotFoundError(kind=kind, version=version, api_version=api_version) from None
    registry: Registry[Any] = Resource.from_contents(schema) @ _definitions(version)
    return jsonschema.Draft202012Validator(schema, registry=registry)


@functools.cache
def _definitions(version: str) -> Registry[Any]:
    contents = schema_contents(f"{_folder(version)}/_definitions.json", version)
    registry: Registry[Any] = Resource.from_contents(contents) @ Registry()
    return registry


def _folder(version: str) -> str:
    return f"kubernetes-json-schema/v{version}.0-local-strict"
