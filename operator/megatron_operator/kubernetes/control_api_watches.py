"""Long polls of the pods' control APIs, so that a change inside a pod is seen when it happens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from megatron_operator.control_client import ControlApiUnreachable, ControlClient
from megatron_operator.kubernetes.port import KubernetesPort
from megatron_operator.replica_groups import pod_is_ready
from megatron_operator.world import ObservedPod, PodPhase, World

LONGEST_POLL = 30.0
"""Seconds. Its readiness probe, which costs us nothing, shows sooner that a launcher hangs, and the connection itself
that it is cut off."""
MIN_POLL_INTERVAL = 0.3
"""Seconds between polls of one pod: the most that a state that changes all the time can ask for."""
RETRY = 1.0
"""Seconds until a pod that does not answer is asked again."""

Key = tuple[str, ControlClient]


class ControlApiWatches:
    """The watches of one resource. ``on_change`` is called when a pod has something new to say, or stops answering."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self._tasks: dict[Key, asyncio.Task[None]] = {}

    def follow(self, world: World, port: KubernetesPort) -> None:
        """Watch the pods of ``world`` that matter, from what ``port`` has seen of them, and no others."""
        wanted = {(pod.uid, port.control_client): pod for pod in world.pods if _matters(pod)}
        for key in self._tasks.keys() - wanted.keys():
            self._tasks.pop(key).cancel()
        for key, pod in wanted.items():
            if key not in self._tasks:
                assert pod.address is not None
                watch = self._watch(port.control_client, pod.address, port.revisions.get(pod.uid))
                self._tasks[key] = asyncio.create_task(watch, name=f"watch of {pod.name}")

    async def close(self) -> None:
        """End all watches."""
        tasks = [self._tasks.pop(key) for key in list(self._tasks)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self, control_client: ControlClient, address: str, seen: int | None) -> None:
        """``seen`` is the revision that was seen last; None while the pod does not answer."""
        while True:
            try:
                revision = (await control_client.state(address, after=seen, wait=LONGEST_POLL)).revision
            except ControlApiUnreachable:
                revision = None
            if revision != seen:
                seen = revision
                self._on_change()
            await asyncio.sleep(MIN_POLL_INTERVAL if revision is not None else RETRY)


def _matters(pod: ObservedPod) -> bool:
    """Who leads, or thinks so, speaks for the engine; another pod has something to tell until it serves.

    One that is silent may think that it leads.
    """
    reachable = pod.phase is PodPhase.RUNNING and pod.address is not None and not pod.deleting
    return reachable and (pod.leader or pod.reports_leader is not False or not pod_is_ready(pod))
