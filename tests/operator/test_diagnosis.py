"""The findings of `doctor` for answers of the API server."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from planning_support.schema import SCHEMA, nodes
from suite_support.definition import without_rules

from megatron_operator.api.crd import crd
from megatron_operator.api.parse import InvalidResource, parse_resource
from megatron_operator.commands import diagnosis
from megatron_operator.commands.diagnosis import Level
from megatron_operator.commands.doctor import secret_keys
from megatron_operator.commands.operator_rights import needed
from megatron_operator.kubernetes.lease import LeaseName

MANIFESTS = Path(__file__).parents[2] / "manifests"
LEASE = LeaseName("megatron-system", "megatron-operator")


def established() -> dict[str, Any]:
    return {**copy.deepcopy(crd()), "status": {"conditions": [{"type": "Established", "status": "True"}]}}


def deployment(*args: str, available: int = 1, image: str = "operator:1", replicas: int = 1) -> dict[str, Any]:
    return {
        "metadata": {"namespace": "system", "name": "operator"},
        "spec": {
            "replicas": replicas,
            "template": {"spec": {"containers": [{"name": "operator", "image": image, "args": list(args)}]}},
        },
        "status": {"availableReplicas": available},
    }


def node(name: str, ready: str = "True", **allocatable: str) -> dict[str, Any]:
    conditions = [{"type": "Ready", "status": ready}]
    return {"metadata": {"name": name}, "status": {"conditions": conditions, "allocatable": allocatable}}


def granted(role: dict[str, Any]) -> set[tuple[str, str, str]]:
    return {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def test_the_checked_permissions_are_those_of_the_roles() -> None:
    roles = {each["kind"]: each for each in yaml.safe_load_all((MANIFESTS / "rbac.yaml").read_text())}
    rights = set(needed("lab", everywhere=True, lease=LEASE, keys=()))
    asked = {(right.group, right.resource, right.verb) for right in rights}
    assert asked == granted(roles["ClusterRole"]) | granted(roles["Role"])
    lease_rule = next(rule for rule in roles["Role"]["rules"] if "resourceNames" in rule)
    named = {right for right in rights if right.name}
    assert {right.name for right in named} == set(lease_rule["resourceNames"])
    assert {right.verb for right in named} == set(lease_rule["verbs"])


def test_an_operator_of_one_namespace_needs_only_its_lease_outside_of_it() -> None:
    rights = set(needed("lab", everywhere=False, lease=LEASE, keys=()))
    assert {right.namespace for right in rights} == {"lab", "megatron-system"}
    assert {right.resource for right in rights if right.namespace == "megatron-system"} == {"leases"}
    assert rights - set(needed("lab", everywhere=False, lease=None, keys=())) == {
        right for right in rights if right.resource == "leases"
    }


def test_permissions_on_secrets_are_checked_by_name() -> None:
    rights = needed("lab", everywhere=True, lease=None, keys=["a-keys", "b-keys"])
    assert [str(right) for right in rights if right.resource == "secrets"] == [
        "get secrets a-keys",
        "get secrets b-keys",
        "create secrets",
    ]


def test_the_lease_of_an_operator_is_read_from_its_deployment() -> None:
    documents = yaml.safe_load_all((MANIFESTS / "operator.yaml").read_text())
    (ours,) = [each for each in documents if each["kind"] == "Deployment"]
    assert diagnosis.lease_of(ours) == LEASE
    assert diagnosis.lease_of(deployment("--lease=a/b")) == LeaseName("a", "b")
    assert diagnosis.lease_of(deployment()) is None
    assert diagnosis.lease_of(deployment("--lease=nonsense")) is None


def test_referenced_secrets_are_listed_with_their_keys() -> None:
    source = {"huggingFace": {"repo": "a/b", "tokenSecret": {"name": "hub", "key": "token"}}}
    template = {"spec": {"imagePullSecrets": [{"name": "registry"}]}}
    users = {"apiKeysSecret": {"name": "hub", "key": "users"}}
    specs = [{"model": {"source": source}, "frontend": users, "podTemplate": template}, {"model": {"source": {}}}]
    assert secret_keys(specs) == {"hub": ["token", "users"], "registry": []}


@pytest.mark.parametrize(
    ("found", "level", "words"),
    [
        (None, Level.MISSING, "does not exist"),
        ({}, Level.MISSING, "has no token, which a model in this namespace uses; it has: nothing"),
        ({"data": {"key": ""}}, Level.MISSING, "it has: key"),
        ({"data": {"token": ""}}, Level.OK, "has the keys that models in this namespace use"),
    ],
)
def test_a_missing_key_of_a_referenced_secret_is_an_error(found: Any, level: Level, words: str) -> None:
    finding = diagnosis.secret("hub", ["token"], found)
    assert finding.level is level
    assert words in finding.words


def test_the_crd_of_this_version_passes() -> None:
    assert diagnosis.definition(established()).level is Level.OK
    assert diagnosis.definition(None).level is Level.MISSING


def test_a_crd_of_another_version_is_reported_with_the_first_different_field() -> None:
    other = established()
    schema = other["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    del schema["properties"]["spec"]["properties"]["routing"]["properties"]["alpha"]
    finding = diagnosis.definition(other)
    assert (finding.level, finding.words.rpartition(" ")[2]) == (Level.WARN, "spec.routing.alpha")


def test_rules_that_an_old_api_server_dropped_are_no_difference() -> None:
    assert diagnosis.definition(without_rules(established())).level is Level.OK


def test_a_missing_rule_is_a_difference() -> None:
    other = established()
    other["spec"]["versions"][0]["schema"]["openAPIV3Schema"].pop(diagnosis.VALIDATIONS)
    assert diagnosis.definition(other).level is Level.WARN


def test_the_probe_of_the_rules_violates_exactly_one_rule() -> None:
    with pytest.raises(InvalidResource) as refused:
        parse_resource(diagnosis.RULE_BREAKER)
    assert [error.field for error in refused.value.errors] == [diagnosis.BROKEN_RULE.removesuffix(": ")]
    rules = [rule for _, node in nodes(SCHEMA) for rule in node.get(diagnosis.VALIDATIONS, [])]
    assert sum(rule["message"].startswith(diagnosis.BROKEN_RULE) for rule in rules) == 1


@pytest.mark.parametrize(
    ("found", "level", "words"),
    [
        ([], Level.MISSING, "no Deployment"),
        ([deployment(available=0)], Level.MISSING, "0 of 1 pods are available"),
        ([deployment(available=0, replicas=0)], Level.MISSING, "0 of 0 pods are available"),
        ([deployment("--namespace=other")], Level.MISSING, "it watches other, but not lab"),
        ([deployment("--namespace=lab")], Level.OK, "system/operator runs as operator:1"),
        ([deployment(), deployment()], Level.WARN, "both watch lab"),
        ([deployment(image="localhost:5000/operator:2")], Level.WARN, "this command is 1"),
        ([deployment(image="localhost:5000/operator")], Level.OK, "runs as localhost:5000/operator"),
    ],
)
def test_a_namespace_without_an_operator_is_an_error(found: list[Any], level: Level, words: str) -> None:
    first = next(iter(diagnosis.operators(found, "lab", "1")))
    assert first.level is level
    assert words in first.words


@pytest.mark.parametrize(
    ("nodes", "asked", "on_cpu", "level"),
    [
        ([node("a", **{"nvidia.com/gpu": "8"})], ["nvidia.com/gpu"], False, Level.OK),
        ([node("a")], ["nvidia.com/gpu"], False, Level.MISSING),
        ([node("a"), node("b", "False", **{"nvidia.com/gpu": "8"})], ["nvidia.com/gpu"], False, Level.MISSING),
        ([node("a")], [], False, Level.WARN),
        ([node("a")], [], True, Level.OK),
        ([node("a", "False")], [], True, Level.MISSING),
        ([], [], True, Level.MISSING),
    ],
)
def test_missing_gpus_are_reported_when_models_request_them(
    nodes: list[Any], asked: list[str], on_cpu: bool, level: Level
) -> None:
    assert list(diagnosis.gpus(nodes, asked, resources_on_cpu=on_cpu))[-1].level is level


def test_claims_without_a_storage_class_need_a_default_class() -> None:
    plain = {"metadata": {"name": "slow"}}
    default = {"metadata": {"name": "fast", "annotations": {diagnosis.DEFAULT_CLASS: "true"}}}
    assert diagnosis.storage([plain]).level is Level.WARN
    assert diagnosis.storage([plain, default]).words == "the default is fast; the cluster has: slow, fast"
    assert diagnosis.claim("w", {"status": {"phase": "Pending"}}).level is Level.WARN
    assert diagnosis.claim("w", {"status": {"phase": "Bound"}}).level is Level.OK


def test_an_api_server_that_does_not_enforce_the_rules_is_a_warning_at_any_version() -> None:
    assert diagnosis.api_server({"gitVersion": "v1.27.3-gke.100", "minor": "27+"}).words == "v1.27.3-gke.100"
    assert diagnosis.rules(enforced=True).level is Level.OK
    assert diagnosis.rules(enforced=False).level is Level.WARN


def test_queues_and_pod_security_levels_are_listed_without_a_verdict() -> None:
    assert diagnosis.kueue(["apps", "kueue.x-k8s.io"]).words == "is installed"
    labels = {diagnosis.ENFORCED: "restricted"}
    assert "restricted is enforced in lab" in diagnosis.pod_security("lab", {"metadata": {"labels": labels}}).words
    assert diagnosis.pod_security("lab", None).level is Level.MISSING
