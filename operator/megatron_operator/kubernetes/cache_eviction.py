"""Evicts models from shared caches: reads Jobs, resources and pods from time to time, and takes the next steps."""

from __future__ import annotations

import asyncio
import http
import logging
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from megatron_operator import names
from megatron_operator.api.parse import InvalidResource, parse_resource
from megatron_operator.api.v1alpha1 import API_VERSION, KIND
from megatron_operator.cache_eviction import CachedModel, CacheJob, eviction_steps
from megatron_operator.downloads import DownloadPhase
from megatron_operator.kubernetes.api_server import ApiServer, ServerRefusal
from megatron_operator.kubernetes.model_caches import observed_downloads, outlives_resource
from megatron_operator.observed_state import AdapterError, ApplyChild, DeleteChild, NamespaceTerminating
from megatron_operator.render.model_cache import VOLUME
from megatron_operator.timestamps import seconds

PERIOD = 60.0
"""Seconds between two looks at the Jobs, if the retention is not shorter."""
OURS = {"app.kubernetes.io/managed-by": names.MANAGER}

Object = Mapping[str, Any]
logger = logging.getLogger("megatron_operator")


class CacheEviction:
    """Runs between ``start`` and ``stop``. Needs no other rights than downloads do."""

    def __init__(self, api: ApiServer, namespaces: Collection[str], retention: int) -> None:
        """No ``namespaces`` means all. Models stay for ``retention`` seconds after their last use."""
        self._api = api
        self._scopes = tuple(namespaces) or ("",)
        self._retention = retention
        self._task: asyncio.Task[None] | None = None
        self._problem = ""

    def start(self) -> None:
        """This operator holds the Lease."""
        self._task = asyncio.create_task(self._run(), name="eviction from model caches")

    async def stop(self) -> None:
        """End the task; Jobs stay as they are."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(min(PERIOD, max(1.0, self._retention)))
            try:
                await self._look()
            except AdapterError as error:
                self._report(f"model caches: {error}")
            except Exception:
                logger.exception("model caches: a look at unused models failed unexpectedly")
            else:
                self._problem = ""

    async def _look(self) -> None:
        for scope in self._scopes:
            by_namespace = defaultdict(list)
            for job in await self._api.list(names.JOB, scope, OURS):
                if (known := cache_job(job)) is not None:
                    by_namespace[job["metadata"]["namespace"]].append(known)
            for namespace, jobs in by_namespace.items():
                try:
                    await self._evict(namespace, jobs)
                except NamespaceTerminating:
                    continue

    async def _evict(self, namespace: str, jobs: Sequence[CacheJob]) -> None:
        used = await self._used(namespace)
        if used is None:
            return
        uids = {job.name: job.manifest["metadata"]["uid"] for job in jobs}
        for step in eviction_steps(jobs, used, await self._lost_places(namespace, jobs), self._retention, time.time()):
            match step:
                case ApplyChild(manifest):
                    logger.info("%s: %s", namespace, _told(manifest))
                    await self._create(manifest)
                case DeleteChild(kind, name):
                    await self._api.delete(kind, namespace, name, uid=uids[name], grace_seconds=0)

    async def _used(self, namespace: str) -> set[CachedModel] | None:
        """The models in shared caches that resources name or pods read; None when a resource cannot be read."""
        used = set()
        for obj in await self._api.list("MegatronInference", namespace, {}):
            try:
                # Items of a list have no kind.
                resource = parse_resource({**obj, "apiVersion": API_VERSION, "kind": KIND})
            except InvalidResource:
                return None
            await asyncio.sleep(0)  # Parsing takes a millisecond.
            cache = resource.spec.model.cache
            if cache is not None and cache.is_shared:
                root = cache.claim_name if cache.host_path is None else cache.host_path.path.rstrip("/")
                used.add(CachedModel(str(root), names.cached_source(resource)))
        # After the resources: a pod is older than the change of its resource that makes its model unused.
        for pod in await self._api.list("Pod", namespace, OURS):
            source = (pod["metadata"].get("annotations") or {}).get(names.CACHED_SOURCE_ANNOTATION)
            if source is not None and (root := _root(pod["spec"])) is not None:
                used.add(CachedModel(root.removesuffix(f"/{namespace}/{source}"), source))
        return used

    async def _lost_places(self, namespace: str, jobs: Iterable[CacheJob]) -> set[str]:
        """The claims and nodes of failed evictions that do not exist any more."""
        failed = [job for job in jobs if job.unused == names.EVICTED and job.phase is DownloadPhase.FAILED]
        lost = {job.model.root for job in failed if job.node is None and not await self._has_claim(namespace, job)}
        if nodes := {job.node for job in failed if job.node is not None}:
            try:
                lost |= nodes - {node["metadata"]["name"] for node in await self._api.select("Node", "", "")}
            except ServerRefusal as refusal:
                if refusal.status != http.HTTPStatus.FORBIDDEN:
                    raise
        return lost

    async def _has_claim(self, namespace: str, job: CacheJob) -> bool:
        return await self._api.get(names.CLAIM, namespace, job.model.root) is not None

    async def _create(self, manifest: Mapping[str, Any]) -> None:
        try:
            await self._api.create(manifest)
        except ServerRefusal as refusal:
            if not refusal.conflict:
                raise

    def _report(self, problem: str) -> None:
        """Log a problem when it begins, not each time."""
        if problem != self._problem:
            logger.warning("%s", problem)
        self._problem = problem


def cache_job(job: Object) -> CacheJob | None:
    """A Job of a shared cache; None for other Jobs."""
    metadata = job["metadata"]
    annotations, labels = metadata.get("annotations") or {}, metadata.get("labels") or {}
    unused, source = labels.get(names.UNUSED_LABEL), annotations.get(names.CACHED_SOURCE_ANNOTATION)
    root = _root(job["spec"]["template"]["spec"])
    if source is None or root is None or (unused is None and not outlives_resource(job)):
        return None
    (observed,) = observed_downloads([job], [], [])
    return CacheJob(
        CachedModel(root.rstrip("/"), source),
        annotations.get(names.CACHE_NODE_ANNOTATION),
        unused,
        seconds(metadata["creationTimestamp"]),
        job,
        observed.phase,
        observed.failed_at or 0.0,
    )


def _root(pod: Object) -> str | None:
    """The claim or folder of the cache's volume."""
    for volume in pod.get("volumes") or []:
        if volume["name"] == VOLUME:
            claim, path = volume.get("persistentVolumeClaim"), volume.get("hostPath")
            return str(claim["claimName"]) if claim else str(path["path"]) if path else None
    return None


def _told(manifest: Mapping[str, Any]) -> str:
    metadata = manifest["metadata"]
    source = metadata["annotations"][names.CACHED_SOURCE_ANNOTATION]
    does = "is evicted" if metadata["labels"][names.UNUSED_LABEL] == names.EVICTED else "is unused"
    return f"the model {source} of a model cache {does} (Job {metadata['name']})"
