"""Long polls of the pods' control APIs, to observe changes inside pods at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from megatron_operator.control_client import ControlApiUnreachable, ControlClient
from megatron_operator.kubernetes.adapter import KubernetesAdapter
from megatron_operator.observed_state import ObservedPod, ObservedState, PodPhase
from megatron_operator.replica_groups import pod_is_ready

LONGEST_POLL = 30.0
"""Seconds. The readiness probe detects a hanging launcher sooner, and TCP keepalive a lost connection."""
MIN_POLL_INTERVAL = 0.3
"""Seconds between polls of one pod, which limit the polls of a state that changes all the time."""
RETRY = 1.0
"""Seconds before a pod that did not answer is polled again."""

Key = tuple[str, ControlClient]


class ControlApiWatches:
    """The watches of one resource. They call ``on_change`` when a pod's state changes, or when it stops answering."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self._tasks: dict[Key, asyncio.Task[None]] = {}

    def follow(self, observed: ObservedState, adapter: KubernetesAdapter) -> None:
        """Watch the relevant pods of ``observed``, starting from the revisions of ``adapter``, and no others."""
        wanted = {(pod.uid, adapter.control_client): pod for pod in observed.pods if _matters(pod)}
        for key in self._tasks.keys() - wanted.keys():
            self._tasks.pop(key).cancel()
        for key, pod in wanted.items():
            if key not in self._tasks:
                assert pod.address is not None
                watch = self._watch(adapter.control_client, pod.address, adapter.revisions.get(pod.uid))
                self._tasks[key] = asyncio.create_task(watch, name=f"watch of {pod.name}")

    async def close(self) -> None:
        """End all watches."""
        tasks = [self._tasks.pop(key) for key in list(self._tasks)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self, control_client: ControlClient, address: str, seen: int | None) -> None:
        """``seen`` is the last known revision; None while the pod does not answer."""
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
    """Whether to watch a pod: the leader and pods that report the role have the engine's state, others matter until
    they serve.

    A pod that does not answer may act as leader.
    """
    reachable = pod.phase is PodPhase.RUNNING and pod.address is not None and not pod.deleting
    return reachable and (pod.leader or pod.reports_leader is not False or not pod_is_ready(pod))
