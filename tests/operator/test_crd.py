"""The generated CustomResourceDefinition."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from planning_support.resources import resource_object
from planning_support.schema import SCHEMA, VERSION, nodes
from suite_support import yaml_documents

from megatron_operator.api.crd import DEFINITIONS, REFERENCE, crd, stale_files
from megatron_operator.api.v1alpha1 import MegatronInferenceStatus
from megatron_operator.status import as_json

ROOT = Path(__file__).parents[2]


def test_the_generated_files_are_up_to_date() -> None:
    assert stale_files(ROOT) == [], "run: python -m megatron_operator.api.crd"


@pytest.mark.parametrize("file", DEFINITIONS, ids=str)
def test_the_generated_file_is_the_crd(file: Path) -> None:
    assert yaml_documents.load((ROOT / file).read_text()) == crd()


def test_the_reference_names_every_field() -> None:
    text = (ROOT / REFERENCE).read_text()
    fields = [path for path, _ in nodes(SCHEMA) if path.startswith((".spec.", ".status.")) and not path.endswith("[]")]
    assert len(fields) > 100
    assert [path for path in fields if f"`{path[1:]}`" not in text] == []


def test_every_field_has_a_description() -> None:
    silent = [path for path, node in nodes(SCHEMA) if not node.get("description") and not path.endswith("[]")]
    assert silent == [".metadata"]


def test_the_schema_is_structural() -> None:
    for path, node in nodes(SCHEMA):
        assert not {"$ref", "$defs", "allOf", "oneOf", "title", "const"} & node.keys(), path
        # Kubernetes has booleans here, and JSON Schema numbers.
        assert not {"exclusiveMinimum", "exclusiveMaximum"} & node.keys(), path
        assert "type" in node or node.get("x-kubernetes-int-or-string"), path
        if not node.get("x-kubernetes-int-or-string"):
            assert "anyOf" not in node, path
        # Pruning replaces additionalProperties: an API server with strict validation rejects fields that it would
        # prune.
        assert node.get("additionalProperties") is not False, path


def test_the_schema_is_a_valid_json_schema() -> None:
    of_schemas = jsonschema.Draft7Validator(jsonschema.Draft7Validator.META_SCHEMA)
    assert [error.message for error in of_schemas.iter_errors(SCHEMA)] == []


def test_the_schema_accepts_a_resource_and_its_status() -> None:
    obj = {**resource_object(), "status": as_json(MegatronInferenceStatus())}
    assert [error.message for error in jsonschema.Draft7Validator(SCHEMA).iter_errors(obj)] == []


@pytest.mark.parametrize("size", ["0", "0Gi", "0.0Mi", "00", 0, -1, "-1Gi"])
def test_the_schema_rejects_a_cache_without_memory(size: str | int) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(resource_object(engine={"kvCacheMemory": size}), SCHEMA)


@pytest.mark.parametrize("size", ["1", "0.5Gi", "10Gi", "001", "1.0Mi", 1])
def test_the_schema_accepts_a_cache_with_memory(size: str | int) -> None:
    jsonschema.validate(resource_object(engine={"kvCacheMemory": size}), SCHEMA)


def test_patterns_mean_the_same_in_go_python_and_rust() -> None:
    r"""Classes such as \w are ASCII in Go, and Unicode elsewhere; `.` and $ differ about line ends."""
    for path, node in nodes(SCHEMA):
        pattern = node.get("pattern", "")
        assert not re.search(r"\\[wWdDsSbB]", pattern), path
        assert "." not in re.sub(r"\\\.|\[[^\]]*\]", "", pattern), path


@pytest.mark.parametrize("spec", [{"replicas": 0}, {"lifecycle": "x"}, {"engine": {"kvCacheMemory": "lots"}}])
def test_the_schema_rejects_the_values_that_the_parser_rejects(spec: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(resource_object(**spec), SCHEMA)


def test_an_optional_object_defaults_to_the_defaults_of_its_fields() -> None:
    engine = SCHEMA["properties"]["spec"]["properties"]["engine"]
    assert engine["default"]["blockSizeTokens"] == engine["properties"]["blockSizeTokens"]["default"] == 16
    for path, node in nodes(SCHEMA):
        if "properties" in node and "default" in node:
            fields = {name: each["default"] for name, each in node["properties"].items() if "default" in each}
            assert node["default"] == fields, path


def test_each_default_is_valid_in_the_schema() -> None:
    defaulted = [(path, node) for path, node in nodes(SCHEMA) if "default" in node]
    assert len(defaulted) > 30
    for path, node in defaulted:
        assert [error.message for error in jsonschema.Draft7Validator(node).iter_errors(node["default"])] == [], path


def test_the_status_has_no_defaults() -> None:
    assert [path for path, node in nodes(SCHEMA["properties"]["status"]) if "default" in node] == []


def test_messages_of_rules_name_field_and_remedy() -> None:
    rules = [(node, rule) for _, node in nodes(SCHEMA) for rule in node.get("x-kubernetes-validations", [])]
    assert len(rules) >= 4
    for node, rule in rules:
        field, _, words = rule["message"].rpartition(": ")
        # The rule of a field without parts needs no path: the API server's message begins with it.
        assert field.startswith(("spec.", "metadata.")) == (node["type"] == "object")
        assert any(verb in words for verb in ("set ", "choose "))


def test_conditions_are_a_list_map_by_type() -> None:
    conditions = SCHEMA["properties"]["status"]["properties"]["conditions"]
    assert conditions["x-kubernetes-list-type"] == "map"
    assert conditions["x-kubernetes-list-map-keys"] == ["type"]


def test_the_pod_template_preserves_unknown_fields() -> None:
    template = SCHEMA["properties"]["spec"]["properties"]["podTemplate"]["properties"]["spec"]
    assert template["x-kubernetes-preserve-unknown-fields"] is True


def test_the_crd_has_the_fields_of_kubectl_scale_and_get() -> None:
    assert VERSION["subresources"]["scale"]["specReplicasPath"] == ".spec.replicas"
    status = SCHEMA["properties"]["status"]["properties"]
    paths = [column["jsonPath"] for column in VERSION["additionalPrinterColumns"]]
    for path in [*VERSION["subresources"]["scale"].values(), *paths]:
        if path.startswith(".status."):
            assert path.split(".")[2].partition("[")[0] in status


@pytest.mark.parametrize(
    "engine", [{"mambaMemoryRatio": -0.5}, {"mambaMemoryRatio": 1}, {"prefixCachingMambaGb": -0.5}], ids=str
)
def test_the_schema_rejects_shares_of_recurrent_states_that_can_not_be_given(engine: dict[str, float]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(resource_object(engine=engine), SCHEMA)
    jsonschema.validate(resource_object(engine={"mambaMemoryRatio": 0.25, "prefixCachingMambaGb": 0}), SCHEMA)
