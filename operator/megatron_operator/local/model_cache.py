"""The model cache on this machine: one folder in the place of all claims and folders of nodes.

A download Job is one process, without the retries of a Job controller.
"""

from __future__ import annotations

import os
from pathlib import Path

from megatron_operator import names
from megatron_operator.control_client import PodReport
from megatron_operator.downloads import DownloadPhase, ObservedDownload
from megatron_operator.failures import read_failure
from megatron_operator.local.pod_status import PodStatus
from megatron_operator.observation import Answer
from megatron_operator.observed_state import Manifest, PodPhase
from megatron_operator.render.model_cache import VOLUME


def cache_root() -> Path:
    """``model-cache`` in the cache folder of this project."""
    if chosen := os.environ.get("MEGATRON_CACHE_DIR"):
        return Path(chosen) / "model-cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron-inference" / "model-cache"


def job_pod(job: Manifest) -> Manifest:
    """The pod of a Job, with the name of the Job."""
    template = job["spec"]["template"]
    metadata = {"name": job["metadata"]["name"], "namespace": job["metadata"]["namespace"]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {**template["metadata"], **metadata},
        "spec": {**template["spec"], "terminationGracePeriodSeconds": 0},
    }


def with_local_cache(pod: Manifest) -> Manifest:
    """The pod with the folder of this machine as its cache: the root for a download, else the folder of its source."""
    metadata, spec = pod["metadata"], pod["spec"]
    source = (metadata.get("annotations") or {}).get(names.CACHED_SOURCE_ANNOTATION)
    here = cache_root() if source is None else cache_root() / metadata["namespace"] / source
    local = {"name": VOLUME, "hostPath": {"path": str(here)}}
    volumes = [local if volume["name"] == VOLUME else volume for volume in spec.get("volumes") or []]
    first, *others = spec["containers"]
    mounts = [
        {field: value for field, value in mount.items() if field != "subPath"} if mount["name"] == VOLUME else mount
        for mount in first.get("volumeMounts") or []
    ]
    containers = [{**first, "volumeMounts": mounts}, *others]
    return {**pod, "spec": {**spec, "volumes": volumes, "containers": containers}}


def observed_download(status: PodStatus, answer: Answer) -> ObservedDownload:
    """The download of a pod of a Job."""
    if status.phase is PodPhase.SUCCEEDED:
        return ObservedDownload.completed(status.name, status.message)
    if status.phase is PodPhase.FAILED:
        words = read_failure(status.exit_code, status.reason, status.message).message
        return ObservedDownload(status.name, DownloadPhase.FAILED, message=words, failed_at=status.finished_at)
    loading = answer.loading if isinstance(answer, PodReport) else None
    phase = DownloadPhase.RUNNING if status.phase is PodPhase.RUNNING else DownloadPhase.PENDING
    if loading is None:
        return ObservedDownload(status.name, phase)
    return ObservedDownload(status.name, phase, loading.loaded_bytes, loading.total_bytes)
