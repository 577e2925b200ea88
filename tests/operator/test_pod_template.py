"""Fields that spec.podTemplate removes from a pod, and fields unknown to the cluster."""

from __future__ import annotations

from typing import Any

import pytest
from planning_support.operating import Operating
from planning_support.resources import parsed, resource_object

from megatron_operator.api.parse import InvalidResource
from megatron_operator.names import PodIdentity
from megatron_operator.observed_state import ActionRefused, Manifest
from megatron_operator.reconcile import begin, validated
from megatron_operator.render import render_pod
from megatron_operator.render.merge import dropped_fields, without
from megatron_operator.settings import Settings


def spec_of(**template: Any) -> dict[str, Any]:
    resource = parsed(podTemplate=template, pods={"device": "cuda"})
    spec: dict[str, Any] = render_pod(resource, PodIdentity(0, 0, 0, True, "", 0), Settings())["spec"]
    return spec


def test_a_removed_field_is_not_in_the_pod() -> None:
    whole = spec_of()
    assert whole["securityContext"]["runAsUser"] == 65532
    spec = spec_of(remove=["securityContext.runAsUser", "affinity", "containers.megatron.resources.limits"])
    assert "runAsUser" not in spec["securityContext"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert "affinity" not in spec
    assert spec["containers"][0]["resources"] == {"requests": {"cpu": "1000m", "memory": "2048Mi"}}


def test_an_item_of_a_list_is_removed_by_its_name() -> None:
    spec = spec_of(remove=["volumes.shared-memory"])
    assert [volume["name"] for volume in spec["volumes"]] == ["tmp", "cache"]


def test_a_removed_field_can_be_set_again() -> None:
    affinity = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}
    assert spec_of(remove=["affinity"], spec={"affinity": affinity})["affinity"] == affinity


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("securityContext.runAsUsers", "the pods have no such field"),
        ("containers.other.image", "the pods have no such field"),
        ("restartPolicy", "the pods have no such field"),
        ("security context", "must be a path of fields"),
    ],
)
def test_a_path_without_a_field_is_rejected(path: str, words: str) -> None:
    with pytest.raises(InvalidResource, match=words) as caught:
        validated(resource_object(podTemplate={"remove": [path]}), Settings())
    assert [(error.field, error.value) for error in caught.value.errors] == [("spec.podTemplate.remove[0]", path)]


def test_a_field_that_only_other_pods_of_a_group_have_can_be_removed() -> None:
    scheduling = {"topologyKey": "topology.kubernetes.io/zone"}
    template = {"remove": ["affinity.podAffinity"]}
    spec = {"parallelism": {"tensor": 2}, "scheduling": scheduling, "podTemplate": template}
    resource = validated(resource_object(**spec), Settings())
    other = render_pod(resource, PodIdentity(0, 0, 1, False, "", 0), Settings())
    assert list(other["spec"]["affinity"]) == ["podAntiAffinity"]


def test_removal_does_not_change_its_input() -> None:
    base = {"a": {"b": 1, "c": [{"name": "x", "y": 1}]}}
    assert without(base, "a.b") == {"a": {"c": [{"name": "x", "y": 1}]}}
    assert without(base, "a.c.x.y") == {"a": {"b": 1, "c": [{"name": "x"}]}}
    assert without(base, "a.b.c") is None
    assert base == {"a": {"b": 1, "c": [{"name": "x", "y": 1}]}}


@pytest.mark.parametrize(
    ("override", "stored", "dropped"),
    [
        ({"nodeName": "a"}, {"nodeName": "a"}, []),
        ({"nodeNmae": "a"}, {}, ["spec.nodeNmae"]),
        ({"hostNetwork": False, "tolerations": []}, {}, []),
        ({"affinity": {"nodeAfinity": {"x": 1}}}, {"affinity": {}}, ["spec.affinity.nodeAfinity"]),
        (
            {"containers": [{"name": "megatron", "envv": [1]}]},
            {"containers": [{"name": "other"}, {"name": "megatron", "env": []}]},
            ["spec.containers[0].envv"],
        ),
        (
            {"tolerations": [{"key": "a"}, {"keyy": "b"}]},
            {"tolerations": [{"key": "not-ready"}, {"key": "a"}, {}]},
            ["spec.tolerations[1].keyy"],
        ),
        ({"memory": "1024Mi"}, {"memory": "1Gi"}, []),
    ],
)
def test_fields_that_were_not_stored_are_found(override: Manifest, stored: Manifest, dropped: list[str]) -> None:
    assert list(dropped_fields(override, stored, "spec")) == dropped


async def test_a_field_unknown_to_the_cluster_is_rejected_before_a_pod_is_replaced() -> None:
    operating = Operating(rollout={"maxUnavailable": 1})
    await operating.settle()
    operating.cluster.unknown_fields = {"spec.podTemplate.spec.nodeSelektor": {"gpu": "a"}}
    operating.edit(podTemplate={"spec": {"nodeSelektor": {"gpu": "a"}}})
    for _ in range(3):
        result = await operating.round()
    failed = next(each for each in result.status.conditions if each.type == "Failed")
    assert (failed.status, failed.reason) == ("True", "InvalidSpec")
    assert failed.message.startswith(
        "spec.podTemplate.spec.nodeSelektor: {'gpu': 'a'}: the API server knows no such field"
    )
    assert list(operating.cluster.pods) == ["chat-0-0-0"]
    operating.cluster.unknown_fields = {}
    await operating.round()
    await operating.settle()
    assert list(operating.cluster.pods) == ["chat-0-1-0"]


async def test_a_pod_that_the_cluster_rejects_as_invalid_replaces_no_pod() -> None:
    operating = Operating()
    await operating.settle()

    async def refuses(_pod: Manifest, _override: Manifest) -> dict[str, Any]:
        raise ActionRefused("Pod is invalid: spec.priority: Forbidden (422)")

    operating.cluster.dropped_fields = refuses  # type: ignore[method-assign]
    operating.edit(podTemplate={"spec": {"priority": 7}})
    result = await operating.round()
    assert "spec.priority: Forbidden" in str(result.status.conditions)
    assert list(operating.cluster.pods) == ["chat-0-0-0"]


async def test_a_new_resource_with_a_pod_template_has_no_pods_before_it_is_checked() -> None:
    operating = Operating(podTemplate={"spec": {"nodeSelektor": {"gpu": "a"}}})
    await begin(operating.obj, operating.cluster)
    assert operating.cluster.pods == {}
