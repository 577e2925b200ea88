"""The reconcile loop of one resource: each round observes the whole state and takes the next step."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from dataclasses import dataclass

import httpx

from megatron_operator.events import Event
from megatron_operator.kubernetes.adapter import KubernetesAdapter
from megatron_operator.kubernetes.api_server import ApiServer, Json
from megatron_operator.kubernetes.control_api_watches import ControlApiWatches
from megatron_operator.kubernetes.disruptions import Disruptions
from megatron_operator.kubernetes.fleet_rollout import FleetRollout
from megatron_operator.kubernetes.gang_kinds import GangKinds
from megatron_operator.kubernetes.kubernetes_event import kubernetes_event
from megatron_operator.kubernetes.kueue_workloads import delete_workloads_of_deleted
from megatron_operator.kubernetes.missing_kinds import MissingKinds
from megatron_operator.metrics import Meters, RoundOutcome
from megatron_operator.observed_state import AdapterError, NamespaceTerminating
from megatron_operator.reconcile import ReconcileResult, begin, reconcile
from megatron_operator.settings import Settings

RESYNC = 600.0
"""Seconds without an event after which the loop checks what is not watched: the Secret with the keys."""
RESYNCS_PER_ROUND = 36
"""Such checks before a round without an event, for an event that was missed."""
COALESCE = 0.05
"""Seconds in which events are merged into one round."""
FIRST_RETRY = 0.5
LONGEST_RETRY = 30.0

logger = logging.getLogger("megatron_operator")


@dataclass(frozen=True)
class Shared:
    """What all loops share.

    ``http`` connects to pods; ``slots`` limits the number of concurrent rounds.
    """

    api: ApiServer
    http: httpx.AsyncClient
    settings: Settings
    meters: Meters
    slots: asyncio.Semaphore
    kinds: MissingKinds
    gang_kinds: GangKinds
    disruptions: Disruptions
    fleet: FleetRollout


class ResourceLoop:
    """``run`` runs the loop; ``wake`` triggers a round. Rounds of one resource never overlap."""

    def __init__(self, namespace: str, name: str, shared: Shared, new_resource: Json | None = None) -> None:
        """``new_resource`` is a resource without a status."""
        self.namespace = namespace
        self.name = name
        self._shared = shared
        self._new_resource = new_resource
        self._woken = asyncio.Event()
        self._written_version: str | None = None
        self._failures = 0
        self._problems: tuple[str, ...] = ()
        self._uid: str | None = None
        self._adapter: KubernetesAdapter | None = None
        self._wake_up = self._woken.set
        self.nodes: frozenset[str] = frozenset()
        """Names of the nodes of the pods, as of the last round."""
        self.has_kept_pods = False
        """Whether Kueue has kept a deleted pod that never had a node."""
        self._watches = ControlApiWatches(self._wake_up)

    def wake(self, version: str | None = None) -> None:
        """``version`` is the resource's version. The event for a status that this loop wrote triggers nothing."""
        if version is None or version != self._written_version:
            self._woken.set()

    async def run(self) -> None:
        """Returns when the resource is gone and no event for a new one of that name has arrived."""
        if self._new_resource is not None:
            await self._begin(self._new_resource)
        while True:
            self._woken.clear()
            delay = await self._round()
            if delay is None and not self._woken.is_set():
                return
            await (self._rest_until_needed() if delay == math.inf else self._rest(delay or 0.0))

    async def close(self) -> None:
        """End the watches and polls."""
        self._shared.kinds.forget(self._wake_up)
        await self._watches.close()
        if self._adapter is not None:
            await self._adapter.close()

    async def _rest(self, delay: float) -> bool:
        """Wait for ``delay`` seconds or an event; returns whether there was one. After a failure, events wait for the
        back-off too."""
        least = min(delay, FIRST_RETRY) if self._failures else COALESCE
        try:
            async with asyncio.timeout(delay):
                await self._woken.wait()
        except TimeoutError:
            return False
        await asyncio.sleep(least)
        return True

    async def _rest_until_needed(self) -> None:
        """Wait for an event, or until the keys are gone. Many resources that wait for nodes thus cost little."""
        for _ in range(RESYNCS_PER_ROUND):
            if await self._rest(RESYNC * random.uniform(0.9, 1.1)) or not await self._has_keys():
                return

    async def _has_keys(self) -> bool:
        try:
            return self._adapter is not None and await self._adapter.has_keys(self.name, self.namespace)
        except AdapterError:
            return False  # The round reports the error.

    async def _begin(self, new_resource: Json) -> None:
        """Create the first pods. This takes few requests, so it does not wait for a slot.

        With keys, there may be pods of a deleted resource of the same name, which the first round adopts.
        """
        try:
            adapter = await self._adapter_of(new_resource)
            if not await adapter.has_keys(self.name, self.namespace):
                await begin(new_resource, adapter, settings=self._shared.settings)
        except Exception:
            logger.exception("%s: the first pods could not be created", self)

    async def _round(self) -> float | None:
        """Seconds to the next round, infinite until an event; None when the resource is gone. Never raises."""
        async with self._shared.slots:
            with self._shared.meters.round() as measured:
                try:
                    result = await self._reconcile()
                    if result is not None and self._tell(result.problems):
                        measured.outcome = RoundOutcome.ERROR
                except AdapterError as error:
                    measured.outcome = RoundOutcome.ERROR
                    logger.warning("%s: %s", self, error)
                    return self._retry_after()
                except Exception:
                    measured.outcome = RoundOutcome.BUG
                    logger.exception("%s: a round failed unexpectedly", self)
                    return self._retry_after()
        if result is None:
            return None
        self._failures = min(self._failures + 1, 16) if result.failed else 0
        return math.inf if result.requeue_after is None else result.requeue_after

    async def _reconcile(self) -> ReconcileResult | None:
        obj = await self._shared.api.get("MegatronInference", self.namespace, self.name)
        if obj is None:
            # A loop that never saw the resource may have begun for such pods while another operator held the Lease.
            if self.has_kept_pods or self._uid is None:
                await delete_workloads_of_deleted(self._shared.api, self.namespace, self.name)
            return None
        adapter = await self._adapter_of(obj)
        key, fleet = (self.namespace, self.name), self._shared.fleet
        result = await reconcile(
            obj, adapter, settings=self._shared.settings, failures=self._failures, may_upgrade=fleet.has_turn(key)
        )
        if not await self._report(obj, result):
            return None
        if result.observed is not None:
            fleet.observed(key, result.image_state, is_settled=result.is_settled)
            self._watches.follow(result.observed, adapter)
            self.nodes = frozenset(pod.node for pod in result.observed.pods if pod.node is not None)
        return result

    async def _adapter_of(self, obj: Json) -> KubernetesAdapter:
        """The adapter of this object; another object of the same name gets its own."""
        uid = obj["metadata"]["uid"]
        if self._adapter is None or uid != self._uid:
            await self.close()
            self._uid = uid
            shared = self._shared
            self._adapter = KubernetesAdapter(
                shared.api,
                uid,
                shared.http,
                shared.kinds,
                shared.gang_kinds,
                shared.disruptions,
                self._wake_up,
                model_caches=shared.settings.model_caches,
            )
        return self._adapter

    async def _report(self, obj: Json, result: ReconcileResult) -> bool:
        """Write the status, then the events, so that a conflict repeats no event. False when the object is gone."""
        if result.patch:
            written = await self._shared.api.patch_status(obj, result.patch)
            if written is None:
                return False
            self._written_version = written["metadata"]["resourceVersion"]
        self._shared.meters.report(self.namespace, self.name, result.status)
        for event in result.events:
            logger.info("%s: %s %s", self, event.reason, event.message)
            await self._post(obj, event)
        return True

    def _tell(self, problems: tuple[str, ...]) -> bool:
        """Whether there are problems. Each is logged when it begins, not in every round."""
        for problem in problems:
            if problem not in self._problems:
                logger.warning("%s: %s", self, problem)
        self._problems = problems
        return bool(problems)

    async def _post(self, obj: Json, event: Event) -> None:
        """Create an event. A failure is logged only."""
        try:
            await self._shared.api.create(kubernetes_event(obj, event))
        except NamespaceTerminating:
            return
        except AdapterError as error:
            logger.warning("%s: event %s is lost: %s", self, event.reason, error)

    def _retry_after(self) -> float:
        delay = min(LONGEST_RETRY, FIRST_RETRY * 2.0**self._failures)
        self._failures = min(self._failures + 1, 16)
        return delay * random.uniform(0.8, 1.2)

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"
