"""Which peers reach which port of a resource's pods, by the rendered policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from planning_support.resources import parsed
from suite_support.kubernetes_schemas import check

from megatron_operator.names import child_labels
from megatron_operator.render.network_policy import OPERATOR, network_policy
from megatron_operator.settings import NetworkPolicies, Settings

MANIFESTS = Path(__file__).parents[2] / "manifests"
PROMETHEUS = {"namespaceSelector": {}, "podSelector": {"matchLabels": {"app": "prometheus"}}}
SETTINGS = Settings(network_policies=NetworkPolicies("megatron-system", (PROMETHEUS,)))
OWN_NAMESPACE = "models"
HTTP, CONTROL, METRICS, COORDINATOR, RENDEZVOUS = 8000, 9000, 9001, 5557, 29500

ANYONE = (OWN_NAMESPACE, {"app": "shop"})
OPERATOR_POD = ("megatron-system", OPERATOR)
IMPOSTOR = ("other", OPERATOR)
PROMETHEUS_POD = ("monitoring", {"app": "prometheus"})
PEER = (OWN_NAMESPACE, child_labels("chat"))
NEIGHBOUR = (OWN_NAMESPACE, child_labels("code"))
INGRESS_CONTROLLER = ("ingress-nginx", {"app.kubernetes.io/name": "ingress-nginx"})
NAMESAKE = ("other", child_labels("chat"))

Pod = tuple[str, dict[str, str]]


def rendered(**spec: Any) -> dict[str, Any]:
    policy = network_policy(parsed(**spec), SETTINGS)
    assert policy is not None
    return policy


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    assert set(selector) <= {"matchLabels"}
    return bool(selector.get("matchLabels", {}).items() <= labels.items())


def is_peer(peer: dict[str, Any], pod: Pod) -> bool:
    """As in Kubernetes: without a namespaceSelector a peer is in the policy's own namespace."""
    namespace, labels = pod
    if "namespaceSelector" not in peer:
        return namespace == OWN_NAMESPACE and selects(peer["podSelector"], labels)
    in_namespace = selects(peer["namespaceSelector"], {"kubernetes.io/metadata.name": namespace})
    return in_namespace and selects(peer.get("podSelector", {}), labels)


def lets_in(policy: dict[str, Any], pod: Pod, port: int) -> bool:
    for rule in policy["spec"]["ingress"]:
        ports = [each["port"] for each in rule.get("ports", [])]
        if ports and port not in ports:
            continue
        if "from" not in rule or any(is_peer(peer, pod) for peer in rule["from"]):
            return True
    return False


@pytest.mark.parametrize(
    ("pod", "ports"),
    [
        (ANYONE, {HTTP}),
        (NEIGHBOUR, {HTTP}),
        (INGRESS_CONTROLLER, {HTTP}),
        (NAMESAKE, {HTTP}),
        (IMPOSTOR, {HTTP}),
        (PEER, {HTTP, COORDINATOR}),
        (OPERATOR_POD, {HTTP, CONTROL}),
        (PROMETHEUS_POD, {HTTP, METRICS}),
    ],
    ids=["anyone", "neighbour", "ingress", "namesake", "impostor", "peer", "operator", "prometheus"],
)
def test_each_peer_reaches_exactly_the_ports_that_it_needs(pod: Pod, ports: set[int]) -> None:
    policy = rendered()
    assert {
        port for port in (HTTP, CONTROL, METRICS, COORDINATOR, RENDEZVOUS, 45678) if lets_in(policy, pod, port)
    } == ports


WEB = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "ingress-nginx"}}}


@pytest.mark.parametrize(
    ("settings", "spec"),
    [
        (SETTINGS, {"clientsFrom": [WEB]}),
        (Settings(network_policies=NetworkPolicies("megatron-system", (PROMETHEUS,), (WEB,))), {}),
        (
            Settings(network_policies=NetworkPolicies("megatron-system", (PROMETHEUS,), ({"podSelector": {}},))),
            {"clientsFrom": [WEB]},
        ),
    ],
    ids=["by the resource", "by the chart", "by the resource instead of the chart"],
)
def test_the_clients_of_the_http_port_can_be_narrowed(settings: Settings, spec: dict[str, Any]) -> None:
    policy = network_policy(parsed(expose=spec), settings)
    assert policy is not None
    check(policy)
    reach_http = [
        pod for pod in (ANYONE, NEIGHBOUR, INGRESS_CONTROLLER, NAMESAKE, IMPOSTOR) if lets_in(policy, pod, HTTP)
    ]
    assert reach_http == [INGRESS_CONTROLLER]
    assert lets_in(policy, OPERATOR_POD, CONTROL)
    assert lets_in(policy, PEER, COORDINATOR)


def test_all_kinds_of_peers_are_written_as_in_a_network_policy() -> None:
    peers = [
        {"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16"]}},
        {"podSelector": {"matchExpressions": [{"key": "team", "operator": "In", "values": ["a"]}]}},
        {"podSelector": {}, "namespaceSelector": {}},
    ]
    policy = rendered(expose={"clientsFrom": peers})
    check(policy)
    assert policy["spec"]["ingress"][0]["from"] == peers


def test_pods_of_the_same_group_may_connect_on_any_port() -> None:
    policy = rendered(parallelism={"tensor": 2})
    assert all(lets_in(policy, PEER, port) for port in (COORDINATOR, RENDEZVOUS, 45678))
    assert not lets_in(policy, NEIGHBOUR, RENDEZVOUS)


def test_without_peers_for_metrics_nothing_but_the_pods_of_the_resource_connects_to_them() -> None:
    policy = network_policy(parsed(), Settings(network_policies=NetworkPolicies("megatron-system")))
    assert policy is not None
    assert not any(lets_in(policy, pod, METRICS) for pod in (ANYONE, OPERATOR_POD, PROMETHEUS_POD))


def test_the_policy_covers_only_ingress_to_pods_of_the_resource() -> None:
    spec = rendered()["spec"]
    assert spec["policyTypes"] == ["Ingress"]
    assert selects(spec["podSelector"], child_labels("chat"))
    assert not selects(spec["podSelector"], child_labels("code"))


def test_there_is_no_policy_by_default() -> None:
    assert network_policy(parsed(), Settings()) is None


def test_the_operator_pod_has_the_labels_that_the_policy_allows() -> None:
    deployment, *_ = yaml.safe_load_all((MANIFESTS / "operator.yaml").read_text())
    template = deployment["spec"]["template"]
    assert OPERATOR.items() <= template["metadata"]["labels"].items()
    env = {each["name"]: each for each in template["spec"]["containers"][0]["env"]}
    assert env["MEGATRON_OPERATOR_NAMESPACE"]["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.namespace"
    told = {"MEGATRON_OPERATOR_NAMESPACE": "n"} | {name: each["value"] for name, each in env.items() if "value" in each}
    assert Settings.from_environment(told).network_policies is not None
