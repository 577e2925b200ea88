"""Eviction from shared model caches: the Jobs of a model from its last use until it is removed."""

from __future__ import annotations

from typing import Any

import pytest
from planning_support.planning import Planning

from megatron_operator import names
from megatron_operator.cache_eviction import RETRY_AFTER, CachedModel, CacheJob, eviction_steps
from megatron_operator.downloads import DownloadPhase
from megatron_operator.kubernetes.cache_eviction import cache_job
from megatron_operator.observed_state import ApplyChild
from megatron_operator.render import download_job

NOW = 1_700_000_000.0
RETENTION = 3600
SPEC = {
    "source": {"huggingFace": {"repo": "owner/model", "tokenSecret": {"name": "hub", "key": "token"}}},
    "cache": {"hostPath": {"path": "/var/models/", "nodes": ["a"]}},
}


class Jobs:
    """The Jobs of a namespace, as an API server stores them."""

    def __init__(self) -> None:
        resource = Planning(
            model=SPEC, podTemplate={"spec": {"serviceAccountName": "bucket", "imagePullSecrets": [{"name": "pull"}]}}
        ).resource
        self.now = NOW
        self.stored: dict[str, CacheJob] = {}
        self.used: set[CachedModel] = set()
        self.lost: set[str] = set()
        self.add(download_job(resource, "runtime:1", "a"))
        (download,) = self.stored.values()
        self.model = download.model

    def add(self, manifest: dict[str, Any]) -> None:
        created = {**manifest, "metadata": {**manifest["metadata"], "creationTimestamp": "2023-11-14T22:13:20Z"}}
        job = cache_job(created)
        assert job is not None
        self.stored[job.name] = CacheJob(job.model, job.node, job.unused, self.now, created)

    def end(self, name: str, phase: DownloadPhase) -> None:
        job = self.stored[name]
        self.stored[name] = CacheJob(job.model, job.node, job.unused, job.created_at, job.manifest, phase, self.now)

    def look(self) -> None:
        """One look of the operator."""
        steps = list(eviction_steps(list(self.stored.values()), self.used, self.lost, RETENTION, self.now))
        for step in steps:
            if isinstance(step, ApplyChild):
                self.add(dict(step.manifest))
            else:
                del self.stored[step.name]

    def states(self) -> list[str | None]:
        return sorted((job.unused for job in self.stored.values()), key=str)

    def the(self, state: str) -> CacheJob:
        (found,) = [job for job in self.stored.values() if job.unused == state]
        return found


@pytest.fixture
def jobs() -> Jobs:
    """The download Job of a deleted resource."""
    return Jobs()


def test_a_used_model_stays(jobs: Jobs) -> None:
    jobs.used = {jobs.model}
    jobs.now += 100 * RETENTION
    jobs.look()
    assert jobs.states() == [None]


def test_an_unused_model_gets_a_record_that_runs_nothing_and_is_evicted_after_the_retention(jobs: Jobs) -> None:
    for _ in range(3):
        jobs.look()
        assert jobs.states() == [names.RECORDED]
    assert jobs.the(names.RECORDED).manifest["spec"]["parallelism"] == 0
    jobs.now += RETENTION
    for _ in range(2):
        jobs.look()
        assert jobs.states() == [names.EVICTED, names.RECORDED]
    eviction = jobs.the(names.EVICTED)
    assert "parallelism" not in eviction.manifest["spec"]
    jobs.end(eviction.name, DownloadPhase.COMPLETE)
    jobs.look()
    assert jobs.states() == []


def test_a_model_that_is_used_again_is_not_evicted(jobs: Jobs) -> None:
    jobs.look()
    jobs.now += RETENTION
    jobs.look()
    jobs.used = {jobs.model}
    jobs.look()
    assert jobs.states() == []


def test_a_failed_eviction_is_repeated_until_its_node_is_gone(jobs: Jobs) -> None:
    jobs.look()
    jobs.now += RETENTION
    for _ in range(2):
        jobs.look()
        jobs.end(jobs.the(names.EVICTED).name, DownloadPhase.FAILED)
        jobs.look()
        assert jobs.states() == [names.EVICTED, names.RECORDED]
        jobs.now += RETRY_AFTER
        jobs.look()
        assert jobs.states() == [names.RECORDED]
    jobs.lost = {"a"}
    jobs.look()
    assert jobs.states() == []


def test_an_eviction_without_its_record_is_removed(jobs: Jobs) -> None:
    jobs.look()
    jobs.now += RETENTION
    jobs.look()
    del jobs.stored[jobs.the(names.RECORDED).name]
    jobs.look()
    assert jobs.states() == []


def test_an_eviction_has_the_folder_and_node_of_the_download_but_nothing_that_goes_with_the_resource(
    jobs: Jobs,
) -> None:
    (download,) = jobs.stored.values()
    jobs.look()
    jobs.now += RETENTION
    jobs.look()
    eviction = jobs.the(names.EVICTED)
    assert (eviction.model, eviction.node) == (download.model, download.node) == (jobs.model, "a")
    assert jobs.model.root == "/var/models"
    before, spec = (job.manifest["spec"]["template"]["spec"] for job in (download, eviction))
    assert "bucket" not in str(spec)
    assert (spec["affinity"], spec["volumes"]) == (before["affinity"], before["volumes"])
    assert spec["imagePullSecrets"] == [{"name": "pull"}]
    (container,) = spec["containers"]
    assert "env" not in container
    (into,) = [each for each in before["containers"][0]["args"] if each.startswith("--into=")]
    assert container["args"] == ["model", "evict", into.removeprefix("--into="), f"--unused-for={RETENTION // 2}"]
    assert eviction.manifest["spec"]["activeDeadlineSeconds"] == RETENTION // 2
    assert names.OWNER_ANNOTATION not in eviction.manifest["metadata"]["annotations"]


def test_claims_of_the_operator_are_not_evicted() -> None:
    resource = Planning(model={**SPEC, "cache": {"volumeClaim": {"size": "1Gi"}}}).resource
    job = download_job(resource, "runtime:1", None)
    assert cache_job({**job, "metadata": {**job["metadata"], "creationTimestamp": "2023-11-14T22:13:20Z"}}) is None
