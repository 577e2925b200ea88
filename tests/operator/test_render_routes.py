"""Objects that route external clients to the HTTP Service."""

from __future__ import annotations

import re
from typing import Any

import pytest
from planning_support.planning import Planning
from planning_support.resources import parsed
from suite_support.kubernetes_schemas import check

from megatron_operator import names
from megatron_operator.api.quantity import Duration
from megatron_operator.observed_state import ApplyChild, DeleteChild
from megatron_operator.render import render_children
from megatron_operator.render.http_route import gateway_duration
from megatron_operator.settings import Settings

FULL_INGRESS = {
    "className": "nginx",
    "host": "chat.example.com",
    "path": "/v1",
    "tlsSecret": "chat-tls",
    "annotations": {"nginx.ingress.kubernetes.io/proxy-read-timeout": "3600"},
}


def routes(**expose: Any) -> list[dict[str, Any]]:
    children = render_children(parsed(expose=expose), Settings())
    return [child for child in children if child["kind"] in names.ROUTE_KINDS]


def only_route(**expose: Any) -> dict[str, Any]:
    (route,) = routes(**expose)
    return route


def backend_of(service: str) -> dict[str, Any]:
    services = {
        child["metadata"]["name"]: child
        for child in render_children(parsed(), Settings())
        if child["kind"] == "Service"
    }
    (port,) = services[service]["spec"]["ports"]
    return {"name": service, "port": port["port"]}


def test_there_is_no_route_by_default() -> None:
    assert routes() == []


def test_a_default_ingress_routes_all_hosts_and_paths_to_the_service() -> None:
    manifest = only_route(ingress={})
    assert (manifest["kind"], manifest["metadata"]["name"]) == ("Ingress", "chat")
    assert manifest["spec"].keys() == {"rules"}
    (rule,) = manifest["spec"]["rules"]
    (path,) = rule["http"]["paths"]
    service = path["backend"]["service"]
    assert (rule.keys(), path["path"], path["pathType"]) == ({"http"}, "/", "Prefix")
    assert {"name": service["name"], "port": service["port"]["number"]} == backend_of("chat")
    check(manifest)


def test_each_field_of_the_ingress_has_its_effect() -> None:
    manifest = only_route(ingress=FULL_INGRESS)
    spec = manifest["spec"]
    assert spec["ingressClassName"] == "nginx"
    assert spec["tls"] == [{"hosts": ["chat.example.com"], "secretName": "chat-tls"}]
    assert spec["rules"][0]["host"] == "chat.example.com"
    assert spec["rules"][0]["http"]["paths"][0]["path"] == "/v1"
    assert manifest["metadata"]["annotations"]["nginx.ingress.kubernetes.io/proxy-read-timeout"] == "3600"
    check(manifest)


def test_a_route_has_its_gateways_and_no_timeout() -> None:
    manifest = only_route(httpRoute={"parentRefs": [{"name": "public"}]})
    assert (manifest["apiVersion"], manifest["kind"]) == ("gateway.networking.k8s.io/v1", "HTTPRoute")
    assert manifest["metadata"]["name"] == "chat"
    assert manifest["spec"].keys() == {"parentRefs", "rules"}
    assert manifest["spec"]["parentRefs"] == [{"name": "public"}]
    (rule,) = manifest["spec"]["rules"]
    assert rule["backendRefs"] == [backend_of("chat")]
    assert rule["matches"] == [{"path": {"type": "PathPrefix", "value": "/"}}]
    assert rule["timeouts"] == {"request": "0s"}


def test_each_field_of_the_route_has_its_effect() -> None:
    parent = {"name": "public", "namespace": "gateways", "sectionName": "https", "port": 443}
    desired = {
        "parentRefs": [parent, {"name": "inside"}],
        "hostnames": ["chat.example.com", "*.chat.example.com"],
        "path": "/v1",
        "requestTimeout": "1h30m",
        "annotations": {"team": "a"},
    }
    manifest = only_route(httpRoute=desired)
    assert manifest["spec"]["parentRefs"] == [parent, {"name": "inside"}]
    assert manifest["spec"]["hostnames"] == ["chat.example.com", "*.chat.example.com"]
    (rule,) = manifest["spec"]["rules"]
    assert rule["matches"][0]["path"]["value"] == "/v1"
    assert rule["timeouts"] == {"request": "1h30m"}
    assert manifest["metadata"]["annotations"]["team"] == "a"


def test_a_pool_selects_the_pods_with_a_frontend_and_names_its_picker() -> None:
    manifest = only_route(inferencePool={"endpointPicker": {"name": "picker"}})
    assert (manifest["apiVersion"], manifest["kind"]) == ("inference.networking.k8s.io/v1", "InferencePool")
    service = next(each for each in render_children(parsed(), Settings()) if each["metadata"]["name"] == "chat")
    assert manifest["spec"] == {
        "selector": {"matchLabels": service["spec"]["selector"]},
        "targetPorts": [{"number": backend_of("chat")["port"]}],
        "endpointPickerRef": {"name": "picker", "port": {"number": 9002}, "failureMode": "FailClose"},
    }


def test_a_route_beside_a_pool_sends_requests_to_the_pool() -> None:
    found = routes(
        httpRoute={"parentRefs": [{"name": "public"}]},
        inferencePool={"endpointPicker": {"name": "picker", "port": 1, "failureMode": "FailOpen"}},
    )
    by_kind = {each["kind"]: each for each in found}
    (rule,) = by_kind["HTTPRoute"]["spec"]["rules"]
    pool = by_kind["InferencePool"]
    group, _, _ = pool["apiVersion"].partition("/")
    assert rule["backendRefs"] == [{"group": group, "kind": pool["kind"], "name": pool["metadata"]["name"]}]
    assert pool["spec"]["endpointPickerRef"] == {"name": "picker", "port": {"number": 1}, "failureMode": "FailOpen"}


@pytest.mark.parametrize(
    ("written", "shown"),
    [("0s", "0s"), ("90s", "1m30s"), ("1500ms", "1s500ms"), ("0.5h", "30m"), ("2h", "2h"), ("100000s", "27h46m40s")],
)
def test_a_duration_has_the_format_of_the_gateway_api(written: str, shown: str) -> None:
    text = gateway_duration(Duration(written))
    assert text == shown
    assert re.fullmatch(r"([0-9]{1,5}(h|m|s|ms)){1,4}", text)


def test_all_kinds_of_routes_can_be_used_together() -> None:
    pool = {"endpointPicker": {"name": "picker"}}
    found = routes(ingress={}, httpRoute={"parentRefs": [{"name": "public"}]}, inferencePool=pool)
    assert {route["kind"] for route in found} == set(names.ROUTE_KINDS)


def test_a_certificate_without_a_host_applies_to_all_hosts() -> None:
    assert only_route(ingress={"tlsSecret": "any"})["spec"]["tls"] == [{"secretName": "any"}]


def test_user_annotations_do_not_affect_the_comparison_of_an_ingress() -> None:
    mine = only_route(ingress={"annotations": {names.APPLIED_HASH_ANNOTATION: "mine"}})
    assert names.applied_hash(mine["metadata"]) != "mine"


def test_an_ingress_follows_the_spec_and_replaces_no_pod() -> None:
    planning = Planning().settled()
    planning.spec["expose"] = {"ingress": {"host": "a.example.com"}}
    (applied,) = planning.round()
    assert isinstance(applied, ApplyChild)
    assert applied.manifest["kind"] == "Ingress"
    assert planning.round() == []
    planning.spec["expose"] = {"ingress": {"host": "b.example.com"}}
    (applied,) = planning.round()
    assert isinstance(applied, ApplyChild)
    assert applied.manifest["spec"]["rules"][0]["host"] == "b.example.com"
    planning.spec["expose"] = {}
    assert planning.round() == [DeleteChild("Ingress", "chat")]
    assert planning.round() == []
