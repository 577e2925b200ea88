"""The model cache of a resource: which Jobs fill it, whether pods may start, and its status.

A pure function of the resource and the observed state, as the plan is. Each node of a node-local cache, or the claim,
has one Job for a source. The cache is filled when a Job is complete, and the others are complete too or have failed.
Once it was filled with a source, a node that is chosen later delays no pods.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from megatron_operator import names
from megatron_operator.api.v1alpha1 import Cache, CachePhase, CacheStatus, MegatronInference
from megatron_operator.downloads import DownloadPhase, ObservedDownload
from megatron_operator.observed_state import Action, ApplyChild, DeleteChild, ObservedState
from megatron_operator.render import cache_claim, download_job, image_of
from megatron_operator.settings import Settings

RETRY_AFTER = 600.0
"""Seconds from the failure of a Job, which has had its own retries, to the next one."""
NO_NODES = "no node is ready and has the labels of spec.model.cache.hostPath.nodeSelector; label a node, or correct it"
DISABLED = (
    "model caches are disabled in the operator (operator.modelCaches of its chart); enable them, or remove"
    " spec.model.cache"
)
MAY_NOT_LIST = (
    "the operator may not list nodes, which spec.model.cache.hostPath.nodeSelector needs; set hostPath.nodes instead"
)


@dataclass(frozen=True)
class ModelCache:
    """The cache of a resource. Without one, pods may start at once, and nothing has to be done."""

    resource: MegatronInference
    observed: ObservedState
    settings: Settings = field(default_factory=Settings)

    @property
    def spec(self) -> Cache | None:
        """``spec.model.cache``."""
        return self.resource.spec.model.cache

    @cached_property
    def is_filled(self) -> bool:
        """Whether pods may start."""
        if self.spec is None:
            return True
        phases = {self._phase(place) for place in self._places}
        if DownloadPhase.COMPLETE not in phases:
            return False
        return self._was_filled or phases <= {DownloadPhase.COMPLETE, DownloadPhase.FAILED}

    @property
    def filled_nodes(self) -> tuple[str, ...]:
        """The nodes that have the model; empty for a claim."""
        return tuple(
            place for place in self._places if place is not None and self._phase(place) is DownloadPhase.COMPLETE
        )

    def steps(self) -> Iterator[Action]:
        """Creates what is missing, and removes what is not used."""
        if not self.settings.model_caches:
            return
        claim = cache_claim(self.resource)
        if claim is not None and self._hash(claim) != names.applied_hash(claim["metadata"]):
            yield ApplyChild(claim)
        wanted = [self._job(place) for place in self._places]
        for job in wanted:
            existing = self._hash(job)
            if existing is None:
                yield ApplyChild(job)
            elif self._is_to_be_replaced(job, existing):
                yield DeleteChild(names.JOB, job["metadata"]["name"])
        current = {self._source} if self.spec is not None else set()
        lasting = {names.job_child(each.job) for each in self.observed.downloads if each.outlives_resource}
        needed = {names.child_key(manifest) for manifest in [*wanted, *([claim] if claim else [])]}
        for key in sorted(self.observed.children.keys() - needed - lasting):
            kind, name = key.split("/")
            # A claim stays as long as pods have the source that was on it.
            if kind == names.JOB or (kind == names.CLAIM and self._sources_in_use <= current):
                yield DeleteChild(kind, name)

    @property
    def retry_at(self) -> float | None:
        """When time alone requires the next step, in seconds since the epoch."""
        failed = [each.failed_at for each in self._current.values() if each.failed_at is not None]
        return min(failed) + RETRY_AFTER if failed else None

    @cached_property
    def status(self) -> CacheStatus | None:
        """The part of the status about the cache; None without one."""
        if self.spec is None:
            return None
        downloads = [self._current.get(place) for place in self._places]
        known = [each for each in downloads if each is not None]
        total, loaded = sum(each.total_bytes for each in known), sum(each.loaded_bytes for each in known)
        before = self._before
        if self.is_filled and not total:  # the pods of complete Jobs may be gone
            total = loaded = before.total_bytes if before else 0
        on_nodes = self.spec.host_path is not None
        return CacheStatus(
            phase=self._cache_phase(known),
            source=self._source,
            in_use=sorted({self._source, *self._sources_in_use}),
            commit=next((each.commit for each in known if each.commit), before.commit if before else ""),
            downloaded_bytes=loaded if loaded == total else loaded - loaded % max(1, total // 100),
            total_bytes=total,
            nodes=len(self._places) if on_nodes else 0,
            filled_nodes=len(self.filled_nodes),
            message=self._message(known),
        )

    @property
    def _source(self) -> str:
        return names.cached_source(self.resource)

    @cached_property
    def _places(self) -> tuple[str | None, ...]:
        """The nodes that get the model, or None in their place for a claim."""
        if self.spec is None or not self.settings.model_caches:
            return ()
        return (None,) if self.spec.host_path is None else self.observed.cache_nodes or ()

    @cached_property
    def _current(self) -> dict[str | None, ObservedDownload]:
        """The existing Jobs by place."""
        by_name = {each.job: each for each in self.observed.downloads}
        found = {place: by_name.get(names.download_job(self.resource, place)) for place in self._places}
        return {place: download for place, download in found.items() if download is not None}

    @property
    def _sources_in_use(self) -> set[str]:
        """Sources that pods read from the cache."""
        return {pod.cached_source for pod in self.observed.pods if pod.cached_source is not None}

    @property
    def _before(self) -> CacheStatus | None:
        """The last status about the same source."""
        before = self.resource.status.cache
        return before if before is not None and before.source == self._source else None

    @property
    def _was_filled(self) -> bool:
        return self._before is not None and self._before.phase is CachePhase.READY

    def _phase(self, place: str | None) -> DownloadPhase:
        download = self._current.get(place)
        return DownloadPhase.PENDING if download is None else download.phase

    def _job(self, place: str | None) -> dict[str, Any]:
        return download_job(self.resource, image_of(self.resource, self.settings), place)

    def _hash(self, manifest: dict[str, Any]) -> str | None:
        return self.observed.children.get(names.child_key(manifest))

    def _is_to_be_replaced(self, job: dict[str, Any], existing: str) -> bool:
        """Whether an unfinished or failed Job has another template, or the time for another attempt has come."""
        name = job["metadata"]["name"]
        download = next((each for each in self.observed.downloads if each.job == name), None)
        if download is None or download.phase is DownloadPhase.COMPLETE:
            return False
        is_due = download.failed_at is not None and download.failed_at + RETRY_AFTER <= self.observed.now
        return is_due or existing != names.applied_hash(job["metadata"])

    def _cache_phase(self, known: list[ObservedDownload]) -> CachePhase:
        if self.is_filled:
            return CachePhase.READY
        running = [each for each in known if each.phase is DownloadPhase.RUNNING]
        if running:
            is_loaded = all(each.loaded_bytes == each.total_bytes > 0 for each in running)
            return CachePhase.VERIFYING if is_loaded else CachePhase.DOWNLOADING
        if known and all(each.phase is DownloadPhase.FAILED for each in known):
            return CachePhase.FAILED
        return CachePhase.PENDING

    def _message(self, known: list[ObservedDownload]) -> str:
        if not self.settings.model_caches:
            return DISABLED
        if self.spec is not None and self.spec.host_path is not None and not self._places:
            return MAY_NOT_LIST if self.observed.cache_nodes is None else NO_NODES
        said = [f"{each.job}: {each.message}" for each in known if each.message]
        return "; ".join(dict.fromkeys(said))
