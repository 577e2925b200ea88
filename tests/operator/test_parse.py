"""Parsing of resources, and the errors of invalid ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from planning_support.resources import resource_object

from megatron_operator.api.parse import InvalidResource, parse_resource
from megatron_operator.api.v1alpha1 import Lifecycle, Phase

SAMPLES = sorted((Path(__file__).parents[2] / "manifests" / "samples").glob("*.yaml"))


def mistakes(obj: Any) -> dict[str, str]:
    """Field to value and remedy, of an invalid resource."""
    with pytest.raises(InvalidResource) as caught:
        parse_resource(obj)
    return {error.field: f"{error.value!r}: {error.message}" for error in caught.value.errors}


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.name)
def test_a_sample_is_valid(path: Path) -> None:
    obj = yaml.safe_load(path.read_text())
    assert parse_resource(obj).name == obj["metadata"]["name"]


def test_omitted_fields_get_their_defaults() -> None:
    resource = parse_resource(resource_object())
    assert resource.spec.replicas == 1
    assert resource.spec.lifecycle is Lifecycle.RUNNING
    assert resource.spec.engine.kv_cache_memory is None
    assert resource.spec.rollout.drain_timeout == 60
    assert resource.served_name == "chat"
    assert resource.spec.pods_per_group == 1


@pytest.mark.parametrize(
    ("spec", "field", "words"),
    [
        ({"replica": 2}, "spec.replica", "did you mean replicas?"),
        ({"engine": {"kvcacheMemory": "1Gi"}}, "spec.engine.kvcacheMemory", "did you mean kvCacheMemory?"),
        ({"expose": {"routes": {}}}, "spec.expose.routes", "unknown field; remove it"),
        ({"expose": {"httpRoute": {}}}, "spec.expose.httpRoute.parentRefs", "is missing; set it"),
        ({"expose": {"httpRoute": {"parentRefs": []}}}, "spec.expose.httpRoute.parentRefs", "at least 1; add one"),
        (
            {"expose": {"httpRoute": {"parentRefs": [{"name": "a"}], "hostnames": ["https://a"]}}},
            "spec.expose.httpRoute.hostnames[0]",
            "like chat.example.com",
        ),
        (
            {"expose": {"httpRoute": {"parentRefs": [{"name": "a"}] * 33}}},
            "spec.expose.httpRoute.parentRefs",
            "32 at most; leave some out",
        ),
        (
            {"expose": {"httpRoute": {"parentRefs": [{"name": "a", "port": 0}]}}},
            "spec.expose.httpRoute.parentRefs[0].port",
            "at least 1; raise it",
        ),
        ({"expose": {"ingress": {"host": "Chat.example.com"}}}, "spec.expose.ingress.host", "like chat.example.com"),
        ({"expose": {"ingress": {"path": "v1"}}}, "spec.expose.ingress.path", "absolute path"),
        ({"expose": {"ingress": {"class": "nginx"}}}, "spec.expose.ingress.class", "did you mean className?"),
        ({"expose": {"ingress": {"annotations": {"a": 1}}}}, "spec.expose.ingress.annotations.a", "string"),
        ({"autoSuspend": {"idleAfter": 300}}, "spec.autoSuspend.idleAfter", "like 90s, 2m or 1h30m"),
        ({"scheduling": {"queueName": "Team A"}}, "spec.scheduling.queueName", "must hold only a-z"),
        ({"scheduling": {"topologyKey": "/zone"}}, "spec.scheduling.topologyKey", "must be a label key"),
        ({"lifecycle": "Runing"}, "spec.lifecycle", "'Running', 'Paused', 'Suspended' or 'Stopped'"),
        ({"replicas": 0}, "spec.replicas", "at least 1"),
        ({"replicas": "2"}, "spec.replicas", "valid integer"),
        ({"engine": {"kvCacheMemory": "lots"}}, "spec.engine.kvCacheMemory", "like 256Mi or 20Gi"),
        ({"rollout": {"drainTimeout": 60}}, "spec.rollout.drainTimeout", "like 90s, 2m or 1h30m"),
        ({"model": {"source": {}}}, "spec.model.source", "none is set"),
        ({"model": {"source": {"path": "x"}}}, "spec.model.source.path", "absolute path"),
        ({"model": {}}, "spec.model.source", "is missing"),
        ({"model": {"source": {"image": {}}}}, "spec.model.source.image.reference", "is missing"),
        ({"model": {"source": {"image": {"reference": "a b"}}}}, "spec.model.source.image.reference", "like registry"),
        (
            {"model": {"source": {"image": {"reference": "a", "pullPolicy": "Seldom"}}}},
            "spec.model.source.image.pullPolicy",
            "'Always', 'IfNotPresent' or 'Never'",
        ),
        ({"model": {"source": {"image": {"reference": "a"}, "path": "/m"}}}, "spec.model.source", "not path and image"),
        (
            {"adapters": [{"name": "a", "path": "/1"}, {"name": "a", "path": "/2"}]},
            "spec.adapters[1].name",
            "is the name of another adapter too; choose another one",
        ),
        ({"adapters": [{"name": "a=b", "path": "/1"}]}, "spec.adapters[0].name", "only letters, digits"),
        ({"adapters": [{"name": "a", "path": "1"}]}, "spec.adapters[0].path", "start it with /"),
        ({"parallelism": {"tensor": 0}}, "spec.parallelism.tensor", "at least 1"),
        ({"parallelism": {"tensor": 6, "expert": 4}}, "spec.parallelism.expert", "does not divide the 6 tensor"),
        ({"parallelism": {"tensor": 4, "expert": 6}}, "spec.parallelism.expert", "set it to a divisor or a multiple"),
        (
            {"parallelism": {"tensor": 2, "pipeline": 2, "expert": 4}, "pods": {"ranksPerPod": 9}},
            "spec.pods.ranksPerPod",
            "set it to 8 or less",
        ),
        (
            {"parallelism": {"tensor": 2, "pipeline": 2}, "pods": {"ranksPerPod": 5}},
            "spec.pods.ranksPerPod",
            "is more than the 4 rank(s) of a replica group (pipeline * max(tensor, expert)); set it to 4 or less",
        ),
        ({"pods": {"ranksPerPod": 2}}, "spec.pods.ranksPerPod", "set it to 1 or less"),
        ({"parallelism": {"tensor": 4096}}, "spec.parallelism.tensor", "at most 1024"),
        (
            {"parallelism": {"tensor": 1024, "pipeline": 10}},
            "spec.parallelism.tensor",
            "gives a replica group 10240 ranks (pipeline * max(tensor, expert)), at most 1024 are possible; lower",
        ),
        (
            {"replicas": 200, "parallelism": {"tensor": 16}, "pods": {"ranksPerPod": 3}},
            "spec.replicas",
            "makes 1200 pods (6 per replica group), at most 1024 are possible; lower it, or raise pods.ranksPerPod",
        ),
        (
            {"engine": {"prefixCaching": False}, "routing": {"policy": "LongestPrefix"}},
            "spec.routing.policy",
            "set that to true, or choose RoundRobin",
        ),
        (
            {"rollout": {"maxUnavailable": 0, "maxSurge": 0}},
            "spec.rollout.maxUnavailable",
            "lets the rollout replace no replica group, because maxSurge is 0 too; set one of them to 1 or more",
        ),
        ({"routing": {"alpha": 2}}, "spec.routing.alpha", "at most 1.0"),
        ({"image": ""}, "spec.image", "must not be empty"),
        ({"frontend": {"parsers": ["qwen3", "deepseek_r1"]}}, "spec.frontend.parsers", "remove all but one of them"),
        ({"podTemplate": {"spec": []}}, "spec.podTemplate.spec", "dictionary"),
        ({"podTemplate": {"metadata": {"labels": {"a": 1}}}}, "spec.podTemplate.metadata.labels.a", "string"),
    ],
)
def test_an_error_names_field_value_and_remedy(spec: dict[str, Any], field: str, words: str) -> None:
    found = mistakes(resource_object(**spec))
    assert list(found) == [field]
    assert words in found[field]


def test_two_model_sources_are_rejected_by_name() -> None:
    source = {"path": "/m", "huggingFace": {"repo": "a/b"}}
    found = mistakes(resource_object(model={"source": source}))
    assert "not huggingFace and path: remove all but one" in found["spec.model.source"]


def test_all_errors_are_reported_at_once() -> None:
    found = mistakes(resource_object(replicas=0, lifecycle="x", engine={"maxRequests": 0}))
    assert set(found) == {"spec.replicas", "spec.lifecycle", "spec.engine.maxRequests"}


@pytest.mark.parametrize("name", ["Chat", "1chat", "chat_1", "chat.eu", "c" * 41])
def test_a_name_that_is_invalid_for_pods_and_services_is_rejected(name: str) -> None:
    assert "choose another name" in mistakes(resource_object(name=name))["metadata.name"]


@pytest.mark.parametrize("obj", [None, [], "text", {}, {"kind": "Pod"}, {**resource_object(), "spec": None}])
def test_an_object_of_another_kind_is_rejected(obj: Any) -> None:
    assert mistakes(obj)


def test_a_numeric_string_keeps_its_quotes_in_the_message() -> None:
    with pytest.raises(InvalidResource, match=r"spec\.replicas: '2': "):
        parse_resource(resource_object(replicas="2"))


def test_the_status_of_another_version_is_ignored() -> None:
    known = {"phase": "Running", "fieldOfTheFuture": 1}
    assert parse_resource({**resource_object(), "status": known}).status.phase is Phase.RUNNING
    unknown = {"phase": "Dancing"}
    assert parse_resource({**resource_object(), "status": unknown}).status.phase is Phase.PENDING


def test_unknown_metadata_is_ignored() -> None:
    obj = resource_object()
    obj["metadata"] |= {"labels": {"a": "b"}, "managedFields": []}
    assert parse_resource(obj).name == "chat"
