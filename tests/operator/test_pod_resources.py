"""CPU, memory, devices and node settings of the pods."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from planning_support.resources import parsed, resource_object
from suite_support.kubernetes_schemas import check

from megatron_operator.api.parse import InvalidResource, parse_resource
from megatron_operator.names import PodIdentity
from megatron_operator.render import render_pod
from megatron_operator.settings import Settings

FIRST = PodIdentity(0, 0, 0, True, "", 0)
GPU = "nvidia.com/gpu"


def spec_of(identity: PodIdentity = FIRST, **spec: Any) -> dict[str, Any]:
    rendered: dict[str, Any] = render_pod(parsed(**spec), identity, Settings())["spec"]
    return rendered


def resources(identity: PodIdentity = FIRST, template: Any = None, **pods: Any) -> dict[str, Any]:
    containers = {"spec": {"containers": [{"name": "megatron", "resources": template}]}} if template else {}
    found: dict[str, Any] = spec_of(identity, pods={"device": "cpu", **pods}, podTemplate=containers)["containers"][0]
    return found["resources"]


def test_pods_request_a_gpu_per_rank() -> None:
    assert resources(device="cuda")["limits"] == {GPU: "1"}
    assert resources(device="cuda", gpuResource="amd.com/gpu")["limits"] == {"amd.com/gpu": "1"}
    assert "limits" not in resources(device="cpu")


def test_each_pod_of_a_group_requests_the_gpus_cpus_and_memory_of_its_ranks() -> None:
    spread = {"parallelism": {"tensor": 3, "pipeline": 3}, "pods": {"device": "cuda", "ranksPerPod": 4}}
    assert parsed(**spread).spec.pods_per_group == 3
    last = spec_of(replace(FIRST, index=2), **spread)["containers"][0]["resources"]
    whole = [spec_of(replace(FIRST, index=index), **spread)["containers"][0]["resources"] for index in (0, 1)]
    assert whole == [{"limits": {GPU: "4"}, "requests": {"cpu": "4000m", "memory": "8192Mi"}}] * 2
    assert last == {"limits": {GPU: "1"}, "requests": {"cpu": "1000m", "memory": "2048Mi"}}


def test_on_cpus_the_kv_cache_is_part_of_the_requested_memory() -> None:
    assert resources()["requests"] == {"cpu": "500m", "memory": "2048Mi"}
    small = spec_of(engine={"kvCacheMemory": "1"})["containers"][0]["resources"]
    assert small["requests"]["memory"] == "1025Mi"


@pytest.mark.parametrize(
    ("device", "size", "flag"), [("cpu", None, "1Gi"), ("cuda", None, None), ("cuda", "3Gi", "3Gi")]
)
def test_a_gpu_rank_measures_the_memory_for_its_kv_cache_unless_the_resource_has_a_size(
    device: str, size: str | None, flag: str | None
) -> None:
    engine = {} if size is None else {"kvCacheMemory": size}
    arguments = spec_of(pods={"device": device}, engine=engine)["containers"][0]["args"]
    expected = [] if flag is None else [f"--kv-cache-memory={flag}"]
    assert [each for each in arguments if each.startswith("--kv-cache-memory")] == expected


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ({"requests": {"cpu": 4}}, {"requests": {"cpu": "4", "memory": "2048Mi"}}),
        ({"requests": {"cpu": 0, "memory": "0"}}, {}),
        ({"limits": {"cpu": "100m"}}, {"limits": {"cpu": "100m"}, "requests": {"memory": "2048Mi"}}),
        (
            {"limits": {"rdma/hca": 2}},
            {"limits": {"rdma/hca": "2"}, "requests": {"cpu": "500m", "memory": "2048Mi"}},
        ),
    ],
)
def test_chosen_resources_replace_the_defaults(chosen: dict[str, Any], expected: dict[str, Any]) -> None:
    assert resources(resources=chosen) == expected


def test_a_limit_of_the_pod_template_is_never_exceeded_by_a_default_request() -> None:
    assert resources(template={"limits": {"memory": "512Mi"}}) == {
        "limits": {"memory": "512Mi"},
        "requests": {"cpu": "500m"},
    }
    whole_pod = spec_of(podTemplate={"spec": {"resources": {"limits": {"memory": "512Mi", "cpu": 1}}}})
    assert whole_pod["containers"][0]["resources"] == {}


def test_the_settings_of_nodes_are_those_of_the_pods() -> None:
    scheduling = {
        "nodeSelector": {"zone": "a"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}, {"key": "a", "value": "b", "effect": "NoSchedule"}],
    }
    spec = spec_of(scheduling=scheduling, pods={"runtimeClassName": "nvidia", "hostNetwork": True})
    assert spec["nodeSelector"] == {"zone": "a"}
    assert spec["tolerations"] == [
        {"key": "gpu", "operator": "Exists"},
        {"key": "a", "operator": "Equal", "value": "b", "effect": "NoSchedule"},
    ]
    assert spec["runtimeClassName"] == "nvidia"
    assert (spec["hostNetwork"], spec["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    plain = spec_of()
    assert not {"nodeSelector", "tolerations", "runtimeClassName", "hostNetwork", "dnsPolicy"} & plain.keys()


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"pods": {"resources": {"limits": {GPU: 2}}}}, f"spec.pods.resources.limits.{GPU}"),
        ({"pods": {"resources": {"requests": {"memory": "-1Gi"}}}}, "spec.pods.resources.requests.memory"),
        ({"pods": {"resources": {"requests": {"memory": -1}}}}, "spec.pods.resources.requests.memory"),
        ({"pods": {"resources": {"requests": {"cpu": 1.5}}}}, "spec.pods.resources.requests.cpu"),
        ({"scheduling": {"tolerations": [{"effect": "NoSchedule"}]}}, "spec.scheduling.tolerations[0].operator"),
        (
            {"scheduling": {"tolerations": [{"key": "a", "operator": "Exists", "value": "b"}]}},
            "spec.scheduling.tolerations[0].value",
        ),
        (
            {"scheduling": {"tolerations": [{"key": "a", "tolerationSeconds": 5}]}},
            "spec.scheduling.tolerations[0].tolerationSeconds",
        ),
        ({"scheduling": {"nodeSelector": {"zone": "a b"}}}, "spec.scheduling.nodeSelector.zone"),
        ({"expose": {"clientsFrom": [{}]}}, "spec.expose.clientsFrom[0]"),
        ({"expose": {"clientsFrom": []}}, "spec.expose.clientsFrom"),
        (
            {"expose": {"clientsFrom": [{"ipBlock": {"cidr": "10.0.0.0/33"}}]}},
            "spec.expose.clientsFrom[0].ipBlock.cidr",
        ),
        (
            {"expose": {"clientsFrom": [{"ipBlock": {"cidr": "::/0"}, "podSelector": {}}]}},
            "spec.expose.clientsFrom[0].ipBlock",
        ),
        ({"failurePolicy": {"backoff": "9999999h"}}, "spec.failurePolicy.backoff"),
    ],
)
def test_bad_values_are_refused_with_their_field(spec: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidResource) as refused:
        parse_resource(resource_object(**spec))
    (error,) = refused.value.errors
    assert error.field == field


GPUS = {"name": "gpus", "resourceClaimTemplateName": "two-gpus"}
NETWORK = {"name": "network", "resourceClaimName": "fabric", "requests": ["nic", "switch"]}
WITH_DRA = tuple(f"1.{minor}" for minor in range(34, 38))
"""Versions of Kubernetes with resource.k8s.io/v1."""


def test_claims_are_made_by_the_pod_and_used_by_its_container() -> None:
    pod = render_pod(
        parsed(pods={"device": "cuda", "resourceClaims": [GPUS, NETWORK], "gpuAllocation": "ResourceClaims"}),
        FIRST,
        Settings(),
    )
    check(pod, WITH_DRA)
    assert pod["spec"]["resourceClaims"] == [
        GPUS,
        {"name": "network", "resourceClaimName": "fabric"},
    ]
    found = pod["spec"]["containers"][0]["resources"]
    assert found["claims"] == [
        {"name": "gpus"},
        {"name": "network", "request": "nic"},
        {"name": "network", "request": "switch"},
    ]
    assert "limits" not in found


def test_claims_beside_a_device_plugin_leave_the_number_of_gpus_and_ranks_alone() -> None:
    spec: dict[str, Any] = {
        "pods": {"device": "cuda", "ranksPerPod": 2, "resourceClaims": [NETWORK]},
        "parallelism": {"tensor": 4},
    }
    container = spec_of(**spec)["containers"][0]
    assert container["resources"]["limits"] == {GPU: "2"}
    assert "--ranks-per-pod=2" in container["args"]
    spec["pods"]["gpuAllocation"] = "ResourceClaims"
    claimed = spec_of(**spec)["containers"][0]
    assert GPU not in claimed["resources"].get("limits", {})
    assert claimed["args"] == container["args"]


@pytest.mark.parametrize(
    ("pods", "field", "words"),
    [
        ({"resourceClaims": [{"name": "a"}]}, "spec.pods.resourceClaims[0]", "neither is set"),
        ({"resourceClaims": [{**GPUS, "resourceClaimName": "b"}]}, "spec.pods.resourceClaims[0]", "not both"),
        ({"resourceClaims": [GPUS, GPUS]}, "spec.pods.resourceClaims", "name of two claims"),
        ({"gpuAllocation": "ResourceClaims"}, "spec.pods.gpuAllocation", "needs a claim for the GPUs"),
    ],
)
def test_invalid_claims_are_refused(pods: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(InvalidResource, match=words) as refused:
        parse_resource(resource_object(pods=pods))
    assert [error.field for error in refused.value.errors] == [field]
