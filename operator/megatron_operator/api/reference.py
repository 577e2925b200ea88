"""The reference page of the resource, generated from the CRD; see ``crd.py``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_operator.api.v1alpha1 import API_VERSION, KIND

Schema = Mapping[str, Any]

HEADER = """<!-- Generated from operator/megatron_operator/api by `make crd`. Do not edit. -->

# The resource

`{kind}`, `{api_version}`, short name `mi`; see also `kubectl explain mi.spec`. A field that is left out has its
default; a field without a default is not set, unless it is required. Unknown fields are rejected by name.

"""


def reference_text(schema: Schema) -> str:
    """``schema`` is the OpenAPI schema of the whole object."""
    parts = [HEADER.format(kind=KIND, api_version=API_VERSION)]
    for part, words in (("spec", "The desired state."), ("status", "The observed state, as the operator reports it.")):
        node = schema["properties"][part]
        parts.append(f"## {part}\n\n{words}\n\n")
        parts.append("| field | type | default | what it does |\n|---|---|---|---|\n")
        parts += [f"| {' | '.join(cells)} |\n" for cells in _rows(node, part)]
        parts.append("\n")
        if rules := list(_rules(node)):
            parts.append("Rules across fields:\n\n")
            parts += [f"* {rule}\n" for rule in rules]
            parts.append("\n")
    return "".join(parts).rstrip() + "\n"


def _rows(node: Schema, path: str) -> Iterator[tuple[str, str, str, str]]:
    required = node.get("required", ())
    for name, field in node.get("properties", {}).items():
        here = f"{path}.{name}"
        words = field.get("description", "").replace("|", "\\|")
        yield f"`{here}`", _type(field), _default(field, name in required), words
        inner, below = (field["items"], f"{here}[]") if "items" in field else (field, here)
        yield from _rows(inner, below)


def _type(field: Schema) -> str:
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if "items" in field:
        return f"list of {_type(field['items'])}"
    if field.get("x-kubernetes-int-or-string"):
        return "integer or string"
    kind = "map" if "additionalProperties" in field else str(field.get("type", "any"))
    least, most = field.get("minimum"), field.get("maximum")
    limits = f", {least} to {most}" if least is not None and most is not None else ""
    return kind + limits


def _default(field: Schema, is_required: bool) -> str:
    if is_required:
        return "(required)"
    return f"`{json.dumps(field['default'])}`" if field.get("default") not in (None, {}) else ""


def _rules(node: Schema) -> Iterator[str]:
    for rule in node.get("x-kubernetes-validations", ()):
        yield rule["message"]
    for field in node.get("properties", {}).values():
        yield from _rules(field)
