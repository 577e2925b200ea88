"""The CustomResourceDefinition, generated from the pydantic models.

``python -m megatron_operator.api.crd`` writes ``manifests/crd.yaml``, the copy in the Helm chart, and the reference
``docs/resource.md``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from megatron_operator.api.reference import reference_text
from megatron_operator.api.v1alpha1 import (
    GROUP,
    KIND,
    PLURAL,
    VERSION,
    MegatronInference,
    MegatronInferenceSpec,
    MegatronInferenceStatus,
)
from megatron_operator.api.v1alpha1.resource import LONGEST_NAME, NAME_PATTERN

Schema = dict[str, Any]

DEFINITIONS = (Path("manifests/crd.yaml"), Path("charts/megatron-inference/files/crd.yaml"))
REFERENCE = Path("docs/resource.md")
"""Generated files, relative to the repository's root."""

HEADER = "# Generated from operator/megatron_operator/api by `python -m megatron_operator.api.crd`. Do not edit.\n"

COLUMNS = (
    ("Phase", "string", ".status.phase", "Phase of the resource", 0),
    ("Engine", "string", ".status.engineState", "State of the engine as the leader reports it", 0),
    ("Ready", "string", ".status.ready", "Ready and desired replica groups", 0),
    ("URL", "string", ".status.url", "Base URL of the OpenAI API inside the cluster", 0),
    ("Restarts", "integer", ".status.restarts", "Restarts counted against the budgets", 0),
    ("Age", "date", ".metadata.creationTimestamp", "Time since the resource was created", 0),
    ("Model", "string", ".status.modelName", "The model's name in the OpenAI API", 1),
    ("Reason", "string", '.status.conditions[?(@.type=="Ready")].reason', "Reason of the condition Ready", 1),
)


def crd() -> dict[str, Any]:
    """The CRD, for API servers from 1.25 on. Older ones need it without its CEL rules."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": KIND.lower(),
                "shortNames": ["mi"],
                "categories": ["all"],
            },
            "versions": [_version()],
        },
    }


def crd_text() -> str:
    """The CRD as the generated files have it."""
    return HEADER + yaml.dump(crd(), Dumper=_PlainDumper, sort_keys=False, width=120, allow_unicode=True)


def generated_files() -> dict[Path, str]:
    """The generated files and their contents."""
    return {**dict.fromkeys(DEFINITIONS, crd_text()), REFERENCE: reference_text(_root_schema())}


def stale_files(root: Path) -> list[Path]:
    """Generated files below ``root`` that are out of date."""
    files = generated_files()
    return [file for file, text in files.items() if not (root / file).exists() or (root / file).read_text() != text]


def write_files(root: Path) -> None:
    """Write the generated files below ``root``."""
    for file, text in generated_files().items():
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(text)


def main() -> None:
    """Write the generated files, relative to the repository's root; ``--check`` only compares them."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a file is out of date")
    if not parser.parse_args().check:
        write_files(Path.cwd())
    elif stale := stale_files(Path.cwd()):
        words = ", ".join(str(file) for file in stale)
        sys.exit(f"{words}: out of date; run: python -m megatron_operator.api.crd")


def _version() -> dict[str, Any]:
    return {
        "name": VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": _root_schema()},
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.replicas",
                "statusReplicasPath": ".status.replicas",
                "labelSelectorPath": ".status.selector",
            },
        },
        "additionalPrinterColumns": [
            {"name": name, "type": kind, "jsonPath": path, "description": words, "priority": priority}
            for name, kind, path, words, priority in COLUMNS
        ],
    }


def _root_schema() -> Schema:
    name_rule = {
        "rule": f"self.metadata.name.matches('{NAME_PATTERN}') && self.metadata.name.size() <= {LONGEST_NAME}",
        "message": "metadata.name: must start with a letter and hold at most"
        f" {LONGEST_NAME} of a-z, 0-9 and '-'; choose another name",
    }
    return {
        "type": "object",
        "description": MegatronInference.__doc__,
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string", "description": "Version of the schema of this object."},
            "kind": {"type": "string", "description": "Kind of this object."},
            "metadata": {"type": "object"},
            "spec": _structural(MegatronInferenceSpec.model_json_schema(), with_defaults=True),
            "status": _structural(MegatronInferenceStatus.model_json_schema(mode="serialization"), with_defaults=False),
        },
        "x-kubernetes-validations": [name_rule],
    }


def _structural(document: Schema, *, with_defaults: bool) -> Schema:
    schema = _converted(document, document.get("$defs", {}))
    return schema if with_defaults else _without_defaults(schema)


def _converted(node: Schema, definitions: Mapping[str, Schema]) -> Schema:
    """A node in Kubernetes' structural form: references inlined, null alternatives and titles removed."""
    node = _without_null(_inlined(node, definitions), definitions)
    result = {key: value for key, value in node.items() if key not in ("title", "$defs", "additionalProperties")}
    if "description" in node:
        result["description"] = " ".join(node["description"].split())
    if "properties" in node:
        children = {name: _converted(child, definitions) for name, child in node["properties"].items()}
        result["properties"] = children
    if "items" in node:
        result["items"] = _converted(node["items"], definitions)
    if isinstance(node.get("additionalProperties"), dict):
        result["additionalProperties"] = _converted(node["additionalProperties"], definitions)
    return _with_default(result)


def _inlined(node: Schema, definitions: Mapping[str, Schema]) -> Schema:
    """``node`` with its references resolved; its own description and default take precedence."""
    while "$ref" in node:
        target = definitions[node["$ref"].removeprefix("#/$defs/")]
        node = {**target, **{key: value for key, value in node.items() if key != "$ref"}}
    return node


def _without_null(node: Schema, definitions: Mapping[str, Schema]) -> Schema:
    """Pydantic writes an optional field as ``anyOf`` with null; Kubernetes leaves null out."""
    alternatives = [each for each in node.get("anyOf", ()) if each != {"type": "null"}]
    if len(alternatives) != 1:
        return node
    own = {key: value for key, value in node.items() if key != "anyOf" and (key, value) != ("default", None)}
    return {**_inlined(alternatives[0], definitions), **own}


def _with_default(node: Schema) -> Schema:
    """The default of an optional object has the defaults of all its fields; empty defaults are left out.

    API servers evaluate the CEL rules of a node on its literal default, before they fill in the defaults of its fields.
    """
    default = node.get("default")
    fields: Mapping[str, Schema] = node.get("properties", {})
    filled = {name: field["default"] for name, field in fields.items() if "default" in field}
    if default is not None and filled:
        return {**node, "default": filled}
    if default in (None, "", [], {}) or fields:
        return {key: value for key, value in node.items() if key != "default"}
    return node


def _without_defaults(node: Schema) -> Schema:
    """The status has no defaults: it is what the operator wrote."""
    result = {key: value for key, value in node.items() if key != "default"}
    if "properties" in node:
        result["properties"] = {name: _without_defaults(child) for name, child in node["properties"].items()}
    if "items" in node:
        result["items"] = _without_defaults(node["items"])
    return result


class _PlainDumper(yaml.SafeDumper):
    """Writes shared parts in full, without YAML aliases."""

    def ignore_aliases(self, _data: Any) -> bool:
        return True


if __name__ == "__main__":
    main()
