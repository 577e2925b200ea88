"""The CEL rules of the CRD, evaluated and compared with the parser.

tests/cluster/test_definition.py evaluates them on an API server; these tests need none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import cel
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_support.resources import resource_object
from planning_support.schema import RULES, SCHEMA, nodes

from megatron_operator.api.parse import InvalidResource, parse_resource

Schema = Mapping[str, Any]
TOOLS_OR_REASONING = ["hermes", "mistral", "qwen3", "deepseek_r1", "glm45", "granite"]


def defaulted(schema: Schema, value: Any) -> Any:
    """``value`` with the defaults that an API server fills in before it evaluates the rules."""
    if isinstance(value, dict):
        fields = schema.get("properties", {})
        whole = {name: field["default"] for name, field in fields.items() if "default" in field} | value
        return {name: defaulted(fields.get(name, {}), each) for name, each in whole.items()}
    if isinstance(value, list):
        return [defaulted(schema.get("items", {}), each) for each in value]
    return value


def broken_rules(schema: Schema, value: Any) -> Iterator[str]:
    """The messages of all violated rules of the object and its parts."""
    for rule in schema.get(RULES, []):
        if not cel.evaluate(rule["rule"], {"self": value}):
            yield rule["message"]
    if isinstance(value, dict):
        for name, each in value.items():
            yield from broken_rules(schema.get("properties", {}).get(name, {}), each)
    if isinstance(value, list):
        for each in value:
            yield from broken_rules(schema.get("items", {}), each)


def refused_by_rules(obj: dict[str, Any]) -> set[str]:
    """The fields that the rules reject."""
    return {message.partition(": ")[0] for message in broken_rules(SCHEMA, defaulted(SCHEMA, obj))}


def refused_by_operator(obj: dict[str, Any]) -> set[str]:
    try:
        parse_resource(obj)
    except InvalidResource as invalid:
        return {error.field for error in invalid.errors}
    return set()


sources = st.fixed_dictionaries(
    {},
    optional={
        "path": st.just("/models/x"),
        "huggingFace": st.just({"repo": "a/b"}),
        "persistentVolumeClaim": st.just({"claimName": "m"}),
        "image": st.just({"reference": "registry.example.com/m:1"}),
    },
)
speculations = st.fixed_dictionaries(
    {},
    optional={"method": st.sampled_from(["PromptLookup", "DraftModel"]), "draftModel": st.just("/models/draft.gguf")},
)
sizes = st.integers(1, 6)
degrees = st.one_of(sizes, st.sampled_from([32, 33, 1024]))
specs = st.fixed_dictionaries(
    {"model": st.fixed_dictionaries({"source": sources})},
    optional={
        "replicas": st.sampled_from([1, 31, 32, 1024]),
        "parallelism": st.fixed_dictionaries({}, optional={"tensor": degrees, "pipeline": degrees, "expert": degrees}),
        "pods": st.fixed_dictionaries({}, optional={"ranksPerPod": sizes}),
        "engine": st.fixed_dictionaries({}, optional={"prefixCaching": st.booleans(), "speculation": speculations}),
        "routing": st.fixed_dictionaries(
            {}, optional={"policy": st.sampled_from(["LongestPrefix", "FirstPrefixBlock", "RoundRobin"])}
        ),
        "rollout": st.fixed_dictionaries(
            {}, optional={"maxUnavailable": st.integers(0, 1), "maxSurge": st.integers(0, 1)}
        ),
        "autoSuspend": st.fixed_dictionaries(
            {},
            optional={"idleAfter": st.sampled_from(["0m", "0.5s"]), "stopAfter": st.sampled_from(["0h0s", "1h"])},
        ),
        "frontend": st.fixed_dictionaries(
            {}, optional={"parsers": st.lists(st.sampled_from(TOOLS_OR_REASONING), unique=True, max_size=2)}
        ),
    },
)
names = st.text(st.sampled_from("az19-.A"), min_size=1, max_size=50)


@pytest.mark.parametrize("path", [path for path, node in nodes(SCHEMA) if "default" in node])
def test_the_rules_of_a_node_hold_for_its_literal_default(path: str) -> None:
    """An API server evaluates them on the literal default, and rejects a CRD whose default violates one."""
    node = dict(nodes(SCHEMA))[path]
    assert list(broken_rules(node, node["default"])) == []


def test_the_check_of_defaults_finds_a_rule_about_a_field_without_a_default() -> None:
    parallelism = dict(nodes(SCHEMA))[".spec.parallelism"]
    with pytest.raises(KeyError, match="tensor"):
        list(broken_rules(parallelism, {}))


@given(names, specs)
def test_the_api_server_and_the_operator_reject_the_same_resources(name: str, spec: dict[str, Any]) -> None:
    obj = resource_object(name=name, **spec)
    by_rules, by_operator = refused_by_rules(obj), refused_by_operator(obj)
    assert bool(by_rules) == bool(by_operator)
    # The operator compares fields only after each of them is valid.
    assert by_operator <= by_rules


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"model": {"source": {}}}, "spec.model.source"),
        ({"parallelism": {"tensor": 6, "expert": 4}}, "spec.parallelism.expert"),
        ({"parallelism": {"tensor": 4, "expert": 6}}, "spec.parallelism.expert"),
        ({"pods": {"ranksPerPod": 2}}, "spec.pods.ranksPerPod"),
        ({"parallelism": {"tensor": 2, "expert": 4}, "pods": {"ranksPerPod": 5}}, "spec.pods.ranksPerPod"),
        ({"parallelism": {"tensor": 1024, "pipeline": 2}, "pods": {"ranksPerPod": 64}}, "spec.parallelism.tensor"),
        ({"replicas": 513, "parallelism": {"tensor": 2}}, "spec.replicas"),
        ({"engine": {"prefixCaching": False}, "routing": {"policy": "LongestPrefix"}}, "spec.routing.policy"),
        ({"engine": {"speculation": {"method": "DraftModel"}}}, "spec.engine.speculation.draftModel"),
        ({"engine": {"speculation": {"draftModel": "/models/draft"}}}, "spec.engine.speculation.draftModel"),
        ({"rollout": {"maxUnavailable": 0, "maxSurge": 0}}, "spec.rollout.maxUnavailable"),
        ({"frontend": {"parsers": ["qwen3", "deepseek_r1"]}}, "spec.frontend.parsers"),
        ({"autoSuspend": {"stopAfter": "1h"}}, "spec.autoSuspend.stopAfter"),
    ],
)
def test_each_rule_of_the_spec_rejects_its_invalid_values(spec: dict[str, Any], field: str) -> None:
    assert refused_by_rules(resource_object()) == set()
    assert refused_by_rules(resource_object(**spec)) == {field}
