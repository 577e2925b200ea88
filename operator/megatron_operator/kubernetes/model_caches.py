"""What a cluster tells about the model cache of one resource: its Jobs and claim, and its nodes."""

from __future__ import annotations

import asyncio
import http
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_operator import names
from megatron_operator.api.v1alpha1 import Cache
from megatron_operator.control_client import PodReport
from megatron_operator.downloads import DownloadPhase, ObservedDownload
from megatron_operator.kubernetes.api_server import ApiServer, ServerRefusal
from megatron_operator.kubernetes.node_status import node_is_ready
from megatron_operator.kubernetes.pod_status import download_failure, download_message
from megatron_operator.observation import Answer
from megatron_operator.observed_state import PodPhase
from megatron_operator.timestamps import seconds

Object = Mapping[str, Any]


class ModelCaches:
    """The model cache of one resource. Methods raise AdapterError."""

    def __init__(self, api: ApiServer, *, is_enabled: bool) -> None:
        """Without ``is_enabled`` the operator's role may lack the rights, and nothing is read."""
        self._api = api
        self._is_enabled = is_enabled
        self._kinds: set[str] | None = None if is_enabled else set()
        """Kinds of ``names.CACHE_KINDS`` that may have objects; None before the first observation."""

    async def objects(self, name: str, namespace: str) -> list[Object]:
        """The Jobs and claims of the resource. Most resources have none, so that only kinds that may have some are
        read."""
        kinds = sorted(names.CACHE_KINDS if self._kinds is None else self._kinds)
        labels = names.selector_labels(name)
        listed = await asyncio.gather(*(self._api.list(kind, namespace, labels) for kind in kinds))
        # Items of a list have no kind.
        found = [{**each, "kind": kind} for kind, items in zip(kinds, listed, strict=True) for each in items]
        self._kinds = {each["kind"] for each in found}
        return list(found)

    def will_create(self, kind: str) -> None:
        """An object of the kind is about to be created; it is read from now on."""
        if kind in names.CACHE_KINDS:
            self._kinds = {*(self._kinds or ()), kind}

    async def pods(self, name: str, namespace: str) -> list[Object]:
        """The pods of the Jobs, if there can be any."""
        if names.JOB not in (self._kinds or ()):
            return []
        return list(await self._api.list("Pod", namespace, {names.CACHE_LABEL: name}))

    async def nodes(self, cache: Cache | None) -> tuple[str, ...] | None:
        """The nodes that get the model; None when the operator may not list them. Selected nodes must be ready."""
        if cache is None or cache.host_path is None or not self._is_enabled:
            return ()
        if cache.host_path.nodes:
            return tuple(sorted(set(cache.host_path.nodes)))
        selector = ",".join(f"{label}={value}" for label, value in cache.host_path.node_selector.items())
        try:
            found = await self._api.select("Node", "", selector)
        except ServerRefusal as refusal:
            if refusal.status != http.HTTPStatus.FORBIDDEN:
                raise
            return None
        return tuple(sorted(node["metadata"]["name"] for node in found if node_is_ready(node)))


def observed_downloads(
    jobs: Iterable[Object], pods: Sequence[Object], answers: Sequence[Answer]
) -> list[ObservedDownload]:
    """The Jobs, each with what its latest pod reports."""
    told = list(zip(pods, answers, strict=True))
    found = [(job, _download(job, [(pod, answer) for pod, answer in told if _owner(job, pod)])) for job in jobs]
    return [replace(each, outlives_resource=outlives_resource(job)) for job, each in found]


def outlives_resource(job: Object) -> bool:
    """Whether it is a download Job of a shared cache."""
    return names.OWNER_ANNOTATION in (job["metadata"].get("annotations") or {})


def _download(job: Object, pods: Collection[tuple[Object, Answer]]) -> ObservedDownload:
    name, conditions = job["metadata"]["name"], (job.get("status") or {}).get("conditions") or []
    ended = {each["type"]: each for each in conditions if each.get("status") == "True"}
    ordered = sorted(pods, key=lambda each: each[0]["metadata"]["creationTimestamp"])
    latest, answer = ordered[-1] if ordered else ({}, None)
    failures = [words for pod, _ in ordered if (words := download_failure(pod))]
    if "Complete" in ended:
        return ObservedDownload.completed(name, _last_words(latest))
    if (failed := ended.get("Failed")) is not None:
        words = failures[-1] if failures else f"{failed.get('reason')}: {failed.get('message')}"
        return ObservedDownload(name, DownloadPhase.FAILED, message=words, failed_at=_time(failed, job))
    phase = (latest.get("status") or {}).get("phase")
    loading = answer.loading if isinstance(answer, PodReport) else None
    # A retry repeats only what is missing, so the reason of the last failure stays visible.
    words = download_message(latest) or (failures[-1] if failures else "")
    return ObservedDownload(
        name,
        DownloadPhase.RUNNING if phase == PodPhase.RUNNING else DownloadPhase.PENDING,
        0 if loading is None else loading.loaded_bytes,
        0 if loading is None else loading.total_bytes,
        message=words,
    )


def _owner(job: Object, pod: Object) -> bool:
    uid = job["metadata"]["uid"]
    return any(owner.get("uid") == uid for owner in pod["metadata"].get("ownerReferences") or [])


def _last_words(pod: Object) -> str | None:
    """The termination message of a pod's only container."""
    statuses = (pod.get("status") or {}).get("containerStatuses") or [{}]
    message: str | None = ((statuses[0].get("state") or {}).get("terminated") or {}).get("message")
    return message


def _time(condition: Object, job: Object) -> float:
    return seconds(condition.get("lastTransitionTime") or job["metadata"]["creationTimestamp"])
