"""Long polls of the pods' control APIs, to observe changes inside pods at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from megatron_operator.control_client import ControlApiUnreachable, ControlClient, InvalidAnswer
from megatron_operator.kubernetes.adapter import KubernetesAdapter
from megatron_operator.observed_state import ObservedPod, ObservedState, PodPhase
from megatron_operator.replica_groups import pod_is_ready

LONGEST_POLL = 30.0
"""Seconds. The readiness probe detects a hanging launcher sooner, and TCP keepalive a lost connection."""
MIN_POLL_INTERVAL = 0.3
"""Seconds between polls of one pod, which limit the polls of a state that changes all the time."""
READ_RATE = 256 << 10
"""Bytes of states per second that the watches of a resource read, and as many that the rounds read that they cause:
pods run code of their user, and the operator parses all states in one thread."""
RETRY = 1.0
"""Seconds before a pod that did not answer is polled again; twice as many after each invalid answer in a row."""
LONGEST_RETRY = 30.0

Key = tuple[str, ControlClient]


class ControlApiWatches:
    """The watches of one resource. They call ``on_change`` when a pod's state changes, or when it stops answering; for
    changes within ``MIN_POLL_INTERVAL`` once."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self._sizes: dict[Key, int] = {}
        """Bytes of the last state of each pod."""
        self._next_change = 0.0
        """The time of the event loop before which ``on_change`` is not called."""
        self._pending: asyncio.TimerHandle | None = None

    def follow(self, observed: ObservedState, adapter: KubernetesAdapter) -> None:
        """Watch the relevant pods of ``observed``, starting from the revisions of ``adapter``, and no others."""
        wanted = {(pod.uid, adapter.control_client): pod for pod in observed.pods if _matters(pod)}
        for key in self._tasks.keys() - wanted.keys():
            self._tasks.pop(key).cancel()
            self._sizes.pop(key, None)
        for key, pod in wanted.items():
            if key not in self._tasks:
                assert pod.address is not None
                watch = self._watch(key, pod.address, adapter.revisions.get(pod.uid))
                self._tasks[key] = asyncio.create_task(watch, name=f"watch of {pod.name}")

    async def close(self) -> None:
        """End all watches."""
        if self._pending is not None:
            self._pending.cancel()
            self._pending = None
        tasks = [self._tasks.pop(key) for key in list(self._tasks)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self, key: Key, address: str, seen: int | None) -> None:
        """``seen`` is the last known revision; None while the pod does not answer."""
        _, control_client = key
        invalid = 0
        while True:
            try:
                report = await control_client.state(address, after=seen, wait=LONGEST_POLL)
            except ControlApiUnreachable as error:
                invalid = invalid + 1 if isinstance(error, InvalidAnswer) else 0
                revision, rest = None, min(LONGEST_RETRY, RETRY * 2.0 ** max(0, min(invalid, 16) - 1))
            else:
                self._sizes[key] = report.size
                revision, rest, invalid = report.revision, self._interval, 0
            if revision != seen:
                seen = revision
                self._change()
            await asyncio.sleep(rest)

    @property
    def _interval(self) -> float:
        return max(MIN_POLL_INTERVAL, sum(self._sizes.values()) / READ_RATE)

    def _change(self) -> None:
        if self._pending is None:
            loop = asyncio.get_running_loop()
            self._pending = loop.call_at(max(loop.time(), self._next_change), self._report)

    def _report(self) -> None:
        self._pending = None
        self._next_change = asyncio.get_running_loop().time() + self._interval
        self._on_change()


def _matters(pod: ObservedPod) -> bool:
    """Whether to watch a pod: the leader and pods that report the role have the engine's state, others matter until
    they serve.

    A pod that does not answer may act as leader.
    """
    reachable = pod.phase is PodPhase.RUNNING and pod.address is not None and not pod.deleting
    return reachable and (pod.leader or pod.reports_leader is not False or not pod_is_ready(pod))
