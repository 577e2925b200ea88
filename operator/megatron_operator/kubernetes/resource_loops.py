"""The reconcile loops of all resources."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from megatron_operator.control_client import pod_http_client
from megatron_operator.kubernetes.api_server import ApiServer, Json
from megatron_operator.kubernetes.cache_eviction import CacheEviction
from megatron_operator.kubernetes.disruptions import Disruptions
from megatron_operator.kubernetes.fleet_rollout import FleetRollout
from megatron_operator.kubernetes.gang_kinds import GangKinds
from megatron_operator.kubernetes.missing_kinds import MissingKinds, Watch
from megatron_operator.kubernetes.resource_loop import ResourceLoop, Shared
from megatron_operator.metrics import Meters
from megatron_operator.settings import Settings

MAX_CONCURRENT_ROUNDS = 16

Key = tuple[str, str]


class ResourceLoops:
    """One loop per resource, from its first event until it is gone. No loop runs before ``start_leading``."""

    def __init__(
        self, api: ApiServer, settings: Settings, meters: Meters, watch: Watch, namespaces: Collection[str] = ()
    ) -> None:
        """``watch`` is called with each optional kind that has an object. No ``namespaces`` means all."""
        slots = asyncio.Semaphore(MAX_CONCURRENT_ROUNDS)
        fleet = FleetRollout(settings.max_concurrent_upgrades, meters, lambda key: self.wake(*key))
        kinds = MissingKinds(api, watch)
        self._disruptions = Disruptions(api, has_budgets=settings.disruption_budgets)
        self._shared = Shared(
            api, pod_http_client(), settings, meters, slots, kinds, GangKinds(api), self._disruptions, fleet
        )
        self._eviction = CacheEviction(api, namespaces, settings.cache_retention) if settings.model_caches else None
        self._leading = False
        self._waiting: set[Key] = set()
        """Resources that were seen, also by pods that Kueue keeps, while this operator does not hold the Lease."""
        self._loops: dict[Key, ResourceLoop] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def start_leading(self) -> None:
        """This operator holds the Lease: start the loops."""
        self._leading = True
        self._shared.meters.set_leading(True)
        self._shared.fleet.start()
        if self._eviction is not None:
            self._eviction.start()
        while self._waiting:
            self._start(self._waiting.pop())

    async def stop_leading(self) -> None:
        """End all loops. Resources and pods stay as they are; the next ``start_leading`` starts the loops again."""
        self._leading = False
        self._shared.meters.set_leading(False)
        self._shared.fleet.stop()
        if self._eviction is not None:
            await self._eviction.stop()
        self._waiting |= self._loops.keys()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def close(self) -> None:
        """End all loops for good."""
        await self.stop_leading()
        await self._shared.kinds.close()
        await self._shared.http.aclose()

    async def may_read_nodes(self) -> bool:
        """Whether the operator can find out which nodes are cordoned. Raises AdapterError."""
        return await self._disruptions.may_read_nodes()

    def resource_changed(self, obj: Json, *, gone: bool = False) -> None:
        """Handle an event of the resource: ``obj`` is its latest version, ``gone`` marks its deletion."""
        metadata = obj["metadata"]
        key = (metadata["namespace"], metadata["name"])
        if not self._leading:
            (self._waiting.discard if gone else self._waiting.add)(key)
        elif key not in self._loops:
            self._start(key, new_resource=None if gone or obj.get("status") else obj)
        else:
            self._loops[key].wake(metadata["resourceVersion"])

    def wake(self, namespace: str, name: str) -> None:
        """Handle an event of a child of the resource."""
        if (loop := self._loops.get((namespace, name))) is not None:
            loop.wake()

    def kept_by_kueue(self, namespace: str, name: str) -> None:
        """Handle an event of a deleted pod that Kueue keeps; its resource may be gone, also since before the start."""
        key = (namespace, name)
        if not self._leading:
            self._waiting.add(key)
            return
        if key not in self._loops:
            self._start(key)
        self._loops[key].has_kept_pods = True
        self._loops[key].wake()

    def node_changed(self, node: str, *, is_cordoned: bool) -> None:
        """Handle the cordon of a node, or its end. Other changes of the node cause no rounds."""
        if self._disruptions.node_changed(node, is_cordoned=is_cordoned):
            for loop in self._loops.values():
                if node in loop.nodes:
                    loop.wake()

    def _start(self, key: Key, new_resource: Json | None = None) -> None:
        namespace, name = key
        loop = ResourceLoop(namespace, name, self._shared, new_resource)
        self._loops[key] = loop
        task = asyncio.create_task(self._run(key, loop), name=f"loop of {loop}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, key: Key, loop: ResourceLoop) -> None:
        try:
            await loop.run()
        finally:
            # Before the first await: from here on, an event for a new resource of that name starts a new loop.
            del self._loops[key]
            self._shared.meters.forget(*key)
            self._shared.fleet.forget(key)
            await loop.close()
