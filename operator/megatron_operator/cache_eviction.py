"""Eviction from shared model caches, as a pure function of the Jobs and of what resources and pods use.

The download Job of a shared cache has no owner and stays when its resource is gone. A model that nothing uses gets a
record, and the download Job goes. A record that is older than the retention gets a Job that removes the model. All
steps follow from the objects that exist, so that an operator that was stopped continues where it was.

A model that is used again gets another download Job, which finds it or downloads it again, before pods start.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_operator import names
from megatron_operator.downloads import DownloadPhase
from megatron_operator.observed_state import ApplyChild, DeleteChild
from megatron_operator.render.cache_eviction import eviction_job, unused_record

RETRY_AFTER = 600.0
"""Seconds from the failure of a Job that removes a model to the next one."""


@dataclass(frozen=True, order=True)
class CachedModel:
    """A model in a shared cache of a namespace: ``root`` is a claim or the folder of nodes."""

    root: str
    source: str


@dataclass(frozen=True)
class CacheJob:
    """A Job of a shared cache: of a download, or with ``unused`` of a model that nothing uses (``UNUSED_LABEL``)."""

    model: CachedModel
    node: str | None
    unused: str | None
    created_at: float
    manifest: Mapping[str, Any]
    phase: DownloadPhase = DownloadPhase.PENDING
    failed_at: float = 0.0

    @property
    def name(self) -> str:
        """Name of the Job."""
        return str(self.manifest["metadata"]["name"])

    @property
    def place(self) -> list[str | None]:
        """Identifies the folder in the namespace."""
        return [self.model.root, self.model.source, self.node]


def eviction_steps(
    jobs: Sequence[CacheJob], used: Collection[CachedModel], lost_places: Collection[str], retention: int, now: float
) -> Iterator[ApplyChild | DeleteChild]:
    """The next actions for the Jobs of one namespace, in the order to carry them out.

    ``used`` are the models that resources name or pods read, ``lost_places`` the claims and nodes that do not exist any
    more, ``retention`` the seconds that a model stays after its last use.
    """
    records = {job.name: job for job in jobs if job.unused == names.RECORDED}
    evictions = {job.name: job for job in jobs if job.unused == names.EVICTED}
    for job in jobs:
        if job.unused is None and job.model not in used:
            if names.unused_model(names.RECORDED, job.place) not in records:
                yield ApplyChild(unused_record(job.manifest, job.place))
            yield DeleteChild(names.JOB, job.name)
    for record in records.values():
        eviction = evictions.pop(names.unused_model(names.EVICTED, record.place), None)
        if record.model in used or (record.node or record.model.root) in lost_places:
            yield from _removed(record, eviction)
        elif now - record.created_at < retention:
            continue
        elif eviction is None:
            yield ApplyChild(eviction_job(record.manifest, record.place, retention))
        elif eviction.phase is DownloadPhase.COMPLETE:
            yield from _removed(record, eviction)
        elif eviction.phase is DownloadPhase.FAILED and now - eviction.failed_at >= RETRY_AFTER:
            yield DeleteChild(names.JOB, eviction.name)
    yield from _removed(*evictions.values())


def _removed(*jobs: CacheJob | None) -> Iterator[DeleteChild]:
    return (DeleteChild(names.JOB, job.name) for job in jobs if job is not None)
