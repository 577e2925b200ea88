"""The model cache: which Jobs and claims there are, when pods may start, and the status."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from planning_support.planning import Planning, created, deleted
from planning_support.resources import parsed

from megatron_operator import names
from megatron_operator.api.parse import InvalidResource
from megatron_operator.api.v1alpha1 import CachePhase, ConditionType
from megatron_operator.downloads import DownloadPhase
from megatron_operator.model_cache import RETRY_AFTER
from megatron_operator.names import PodIdentity
from megatron_operator.observed_state import Action, ApplyChild, DeleteChild
from megatron_operator.render import download_job, render_pod
from megatron_operator.settings import Settings

HUB = {"huggingFace": {"repo": "owner/model", "file": "q/m.gguf"}}
CLAIM = {"volumeClaim": {"size": "20Gi", "storageClassName": "fast"}}
NODES = {"hostPath": {"path": "/var/models", "nodes": ["a", "b"]}}


def model(cache: dict[str, Any], **hub: Any) -> dict[str, Any]:
    return {"source": {"huggingFace": {**HUB["huggingFace"], **hub}}, "cache": cache}


def planned(cache: dict[str, Any], **spec: Any) -> Planning:
    planning = Planning(model=model(cache), **spec)
    planning.cluster.cache_nodes = tuple(cache.get("hostPath", {}).get("nodes", ()))
    return planning


def applied(actions: list[Action], kind: str) -> list[dict[str, Any]]:
    manifests = [dict(action.manifest) for action in actions if isinstance(action, ApplyChild)]
    return [manifest for manifest in manifests if manifest["kind"] == kind]


def removed(actions: list[Action], kind: str) -> list[str]:
    return [action.name for action in actions if isinstance(action, DeleteChild) and action.kind == kind]


def advance(planning: Planning, job: str, phase: DownloadPhase, **changes: Any) -> None:
    downloads = planning.cluster.downloads
    downloads[job] = replace(downloads[job], phase=phase, **changes)


def complete(planning: Planning) -> None:
    for job in planning.cluster.downloads:
        advance(planning, job, DownloadPhase.COMPLETE, loaded_bytes=200, total_bytes=200, commit="c0ffee")


def reason(planning: Planning, kind: ConditionType) -> tuple[str, str]:
    condition = planning.status.condition(kind)
    assert condition is not None
    return condition.status, condition.reason


def container(planning: Planning, node: str | None = None) -> dict[str, Any]:
    found: dict[str, Any] = download_job(planning.resource, "runtime:1", node)["spec"]["template"]["spec"]
    return found


def test_pods_start_when_the_claim_of_the_operator_is_filled() -> None:
    planning = planned(CLAIM)
    actions = planning.round()
    (claim,), (job,) = applied(actions, names.CLAIM), applied(actions, names.JOB)
    assert claim["spec"] == {
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": "20Gi"}},
        "storageClassName": "fast",
    }
    mounted = {"claimName": claim["metadata"]["name"]}
    assert job["spec"]["template"]["spec"]["volumes"][-1]["persistentVolumeClaim"] == mounted
    assert claim["metadata"]["ownerReferences"] == job["metadata"]["ownerReferences"]
    assert created(actions) == created(planning.round()) == []
    assert reason(planning, ConditionType.READY) == ("False", "CachePending")
    complete(planning)
    assert created(planning.round()) == ["chat-0-0-0"]
    assert reason(planning, ConditionType.CACHED) == ("True", "CacheFilled")


def test_the_status_has_the_progress() -> None:
    planning = planned(CLAIM)
    planning.round()
    (job,) = planning.cluster.downloads
    seen = []
    for loaded in (0, 1999, 20_000):
        advance(planning, job, DownloadPhase.RUNNING, loaded_bytes=loaded, total_bytes=20_000)
        planning.round()
        assert planning.status.cache is not None
        seen.append((planning.status.cache.phase, planning.status.cache.downloaded_bytes))
    assert seen == [
        (CachePhase.DOWNLOADING, 0),
        (CachePhase.DOWNLOADING, 1800),
        (CachePhase.VERIFYING, 20_000),
    ]
    complete(planning)
    planning.round()
    planning.cluster.downloads[job] = replace(planning.cluster.downloads[job], loaded_bytes=0, total_bytes=0, commit="")
    planning.round()
    assert planning.status.cache is not None
    assert (planning.status.cache.total_bytes, planning.status.cache.commit) == (200, "c0ffee")


def test_the_pods_read_only_the_folder_of_the_source() -> None:
    resource = planned({"claimName": "shared"}).resource
    spec = render_pod(resource, PodIdentity(0, 0, 0, True, "", 0), Settings())["spec"]
    source = names.cached_source(resource)
    (volume,) = [each for each in spec["volumes"] if each["name"] == "model-cache"]
    assert volume["persistentVolumeClaim"] == {"claimName": "shared", "readOnly": True}
    (mount,) = [each for each in spec["containers"][0]["volumeMounts"] if each["name"] == "model-cache"]
    assert (mount["readOnly"], mount["subPath"]) == (True, f"models/{source}")
    assert "--model=/cached-model/q/m.gguf" in spec["containers"][0]["args"]
    assert not any(word.startswith("--hf") for word in spec["containers"][0]["args"])


def test_a_job_has_the_token_and_the_variables_of_the_template_but_no_devices() -> None:
    template = {
        "imagePullSecrets": [{"name": "pull"}],
        "containers": [
            {"name": "megatron", "env": [{"name": "HF_ENDPOINT", "value": "https://mirror"}], "resources": {"a": "b"}},
            {"name": "sidecar", "image": "x"},
        ],
    }
    token = {"name": "hub", "key": "token"}
    planning = Planning(model=model(CLAIM, tokenSecret=token), podTemplate={"spec": template})
    spec = container(planning)
    (only,) = spec["containers"]
    variables = {each["name"]: each for each in only["env"]}
    assert variables["HF_TOKEN"]["valueFrom"]["secretKeyRef"] == token
    assert variables["HF_ENDPOINT"]["value"] == "https://mirror"
    assert spec["imagePullSecrets"] == [{"name": "pull"}]
    assert only["resources"] == {"requests": {"cpu": "500m", "memory": "512Mi"}}
    pod = render_pod(planning.resource, PodIdentity(0, 0, 0, True, "", 0), Settings())["spec"]
    assert "HF_TOKEN" not in {each["name"] for each in pod["containers"][0]["env"]}


@pytest.mark.parametrize(
    ("uri", "path"), [("s3://models/chat/v1", "/cached-model"), ("gs://models/q/m.gguf", "/cached-model/m.gguf")]
)
def test_objects_are_downloaded_with_the_variables_of_the_secret(uri: str, path: str) -> None:
    source = {"objectStorage": {"uri": uri, "credentialsSecret": "bucket"}}
    planning = Planning(model={"source": source, "cache": CLAIM})
    (only,) = container(planning)["containers"]
    into = f"--into=/model-cache/models/{names.cached_source(planning.resource)}"
    assert only["args"] == ["model", "fetch", uri, into]
    assert only["envFrom"] == [{"secretRef": {"name": "bucket"}}]
    pod = render_pod(planning.resource, PodIdentity(0, 0, 0, True, "", 0), Settings())["spec"]["containers"][0]
    assert f"--model={path}" in pod["args"]
    assert "envFrom" not in pod


def test_a_changed_token_downloads_nothing_again() -> None:
    sources = [parsed(model=model(CLAIM, **more)) for more in ({}, {"tokenSecret": {"name": "hub", "key": "token"}})]
    assert len({names.cached_source(each) for each in sources}) == 1
    assert len({names.cached_source(parsed(model=model(CLAIM, revision=each))) for each in ("main", "v1")}) == 2


def test_each_node_gets_a_job_and_pods_wait_for_all_of_them() -> None:
    planning = planned(NODES)
    jobs = applied(planning.round(), names.JOB)
    assert [job["metadata"]["annotations"][names.CACHE_NODE_ANNOTATION] for job in jobs] == ["a", "b"]
    first, second = (job["metadata"]["name"] for job in jobs)
    advance(planning, first, DownloadPhase.COMPLETE)
    advance(planning, second, DownloadPhase.RUNNING)
    assert created(planning.round()) == []
    advance(planning, second, DownloadPhase.COMPLETE)
    actions = planning.round()
    assert created(actions) == ["chat-0-0-0"]
    assert affine(planning) == ["a", "b"]


def affine(planning: Planning) -> list[str]:
    """The nodes that the next pod may run on."""
    nodes = planning.cluster.observed()
    assert nodes.cache_nodes is not None
    planning.cluster.pods.clear()
    (pod,) = [each.manifest for each in planning.look().actions if type(each).__name__ == "CreatePod"]
    required = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    return [field["values"][0] for term in required["nodeSelectorTerms"] for field in term["matchFields"]]


def test_pods_run_without_a_node_whose_download_failed() -> None:
    planning = planned(NODES)
    planning.round()
    first, second = planning.cluster.downloads
    advance(planning, first, DownloadPhase.COMPLETE)
    advance(planning, second, DownloadPhase.FAILED, message="the disk is full", failed_at=planning.cluster.now)
    assert created(planning.round()) == ["chat-0-0-0"]
    assert planning.status.cache is not None
    assert (planning.status.cache.filled_nodes, planning.status.cache.nodes) == (1, 2)
    assert "the disk is full" in planning.status.cache.message
    assert affine(planning) == ["a"]


def test_a_node_that_joins_later_delays_no_pods() -> None:
    planning = planned(NODES)
    planning.round()
    complete(planning)
    planning.settled()
    planning.cluster.cache_nodes = ("a", "b", "c")
    assert len(applied(planning.round(), names.JOB)) == 1
    assert affine(planning) == ["a", "b"]
    planning.cluster.cache_nodes = ("b", "c")
    assert len(removed(planning.round(), names.JOB)) == 1


@pytest.mark.parametrize(("nodes", "words"), [(None, "may not list nodes"), ((), "no node is ready")])
def test_a_selector_without_nodes_is_explained(nodes: tuple[str, ...] | None, words: str) -> None:
    planning = planned({"hostPath": {"path": "/var/models", "nodeSelector": {"gpu": "yes"}}})
    planning.cluster.cache_nodes = nodes
    assert created(planning.round()) == []
    assert words in next(each.message for each in planning.status.conditions if each.type == ConditionType.READY)


def test_a_failed_download_says_why_and_is_tried_again() -> None:
    planning = planned(CLAIM)
    planning.round()
    (job,) = planning.cluster.downloads
    advance(planning, job, DownloadPhase.FAILED, message="m.gguf: sha256 is a", failed_at=planning.cluster.now)
    planning.round()
    assert planning.look().requeue_after == RETRY_AFTER
    assert reason(planning, ConditionType.CACHED) == ("False", "CacheFailed")
    assert reason(planning, ConditionType.DEGRADED) == ("True", "CacheFailed")
    assert "sha256 is a" in next(each.message for each in planning.status.conditions if each.type == "Cached")
    planning.cluster.now += RETRY_AFTER
    assert removed(planning.round(), names.JOB) == [job]
    assert [each["metadata"]["name"] for each in applied(planning.round(), names.JOB)] == [job]


def test_a_job_with_another_template_replaces_one_that_is_not_complete() -> None:
    planning = planned(CLAIM)
    planning.round()
    planning.spec["image"] = "runtime:fixed"
    assert len(removed(planning.round(), names.JOB)) == 1
    assert len(applied(planning.round(), names.JOB)) == 1
    complete(planning)
    planning.spec["image"] = "runtime:other"
    assert removed(planning.round(), names.JOB) == []


def test_a_changed_source_is_filled_before_pods_are_replaced_and_the_old_claim_goes_after_them() -> None:
    planning = planned(CLAIM)
    planning.round()
    complete(planning)
    planning.settled()
    (old,) = [key for key in planning.cluster.children if key.startswith(names.CLAIM)]
    planning.spec["model"] = model(CLAIM, revision="v2")
    actions = planning.round()
    assert len(applied(actions, names.CLAIM)) == len(applied(actions, names.JOB)) == 1
    for _ in range(3):
        assert deleted(actions) == removed(actions, names.CLAIM) == []
        actions = planning.round()
    assert reason(planning, ConditionType.READY) == ("True", "EngineRunning")
    assert reason(planning, ConditionType.PROGRESSING) == ("True", "CachePending")
    complete(planning)
    planning.settled()
    (new,) = [key for key in planning.cluster.children if key.startswith(names.CLAIM)]
    assert new != old
    assert planning.status.cache is not None
    assert planning.status.cache.in_use == [names.cached_source(planning.resource)]


def test_the_cache_is_filled_while_the_model_is_stopped_and_removed_with_its_field() -> None:
    planning = planned(CLAIM, lifecycle="Stopped")
    assert len(applied(planning.round(), names.JOB)) == 1
    planning.spec["model"] = {"source": HUB}
    actions = planning.round()
    assert len(removed(actions, names.JOB)) == len(removed(actions, names.CLAIM)) == 1
    planning.round()
    assert planning.status.cache is None


@pytest.mark.parametrize(("cache", "owned"), [(CLAIM, True), (NODES, False), ({"claimName": "shared"}, False)])
def test_jobs_of_shared_caches_outlive_the_resource(cache: dict[str, Any], owned: bool) -> None:
    planning = planned(cache)
    for job in applied(planning.round(), names.JOB):
        assert ("ownerReferences" in job["metadata"]) is owned
        assert (names.OWNER_ANNOTATION in job["metadata"]["annotations"]) is not owned
        assert job["metadata"]["annotations"][names.CACHED_SOURCE_ANNOTATION] == names.cached_source(planning.resource)


def test_jobs_of_shared_caches_are_left_to_the_eviction() -> None:
    planning = planned({"claimName": "shared"})
    (job,) = applied(planning.round(), names.JOB)
    complete(planning)
    advance(planning, job["metadata"]["name"], DownloadPhase.COMPLETE, outlives_resource=True)
    planning.spec["model"] = model({"claimName": "shared"}, revision="v2")
    actions = planning.round()
    assert len(applied(actions, names.JOB)) == 1
    assert removed(actions, names.JOB) == []


def test_more_nodes_and_a_larger_claim_replace_no_pods() -> None:
    def template(cache: dict[str, Any]) -> str:
        return names.template_hash(parsed(model=model(cache)), "runtime:1")

    assert template(NODES) == template({"hostPath": {"path": "/var/models", "nodeSelector": {"gpu": "yes"}}})
    assert template(CLAIM) == template({"volumeClaim": {"size": "40Gi", "storageClassName": "fast"}})
    assert template(NODES) != template({"hostPath": {"path": "/other", "nodes": ["a"]}})


@pytest.mark.parametrize(
    ("spec", "field", "words"),
    [
        ({"source": HUB, "cache": {}}, "spec.model.cache", "none is set"),
        (
            {"source": {"objectStorage": {"uri": "s3://models/a"}}},
            "spec.model.source.objectStorage",
            "is downloaded into a cache only; set spec.model.cache",
        ),
        ({"source": HUB, "cache": {"claimName": "a", **CLAIM}}, "spec.model.cache", "not claimName and volumeClaim"),
        ({"source": {"path": "/m"}, "cache": CLAIM}, "spec.model.cache", "only models from source.huggingFace or"),
        ({"source": HUB, "cache": {"hostPath": {"path": "/m"}}}, "spec.model.cache.hostPath", "neither is set"),
    ],
)
def test_an_invalid_cache_is_refused(spec: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(InvalidResource) as refused:
        parsed(model=spec)
    assert any(error.field == field and words in str(error) for error in refused.value.errors), refused.value.errors
