"""Whether this pod leads. An operator moves the role between pods by numbered decisions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from megatron_runtime.errors import StaleEpochError
from megatron_runtime.launch.identity import Lifecycle
from megatron_runtime.launch.options import LaunchOptions
from megatron_runtime.launch.pod_state import PodState
from megatron_runtime.processes.supervisor import ChildEnd

if TYPE_CHECKING:
    from megatron_runtime.launch.leader import Leader

logger = logging.getLogger(__name__)

SETTLING_SECONDS = 10.0
"""Time for which a new leader stays as ready as it was, while replica groups register."""


class Leadership:
    """Starts and ends the coordinator of this pod, while ranks and frontends keep running.

    An epoch is the number of a decision. A decision with an older epoch than the newest known one is refused.

    Args:
        key: The shared secret of the coordinator and its peers.
        on_failure: Called with the end of a coordinator that can't work with its options.
        on_change: Called when a coordinator starts or ends.
    """

    def __init__(
        self,
        options: LaunchOptions,
        state: PodState,
        *,
        key: str | None,
        on_failure: Callable[[ChildEnd], None],
        on_change: Callable[[], None],
    ) -> None:
        self._options = options
        self._state = state
        self._key = key
        self._on_failure = on_failure
        self._on_change = on_change
        self._lock = asyncio.Lock()
        self._earlier_restarts = 0
        self._leader: Leader | None = None
        self._settled: asyncio.TimerHandle | None = None

    @property
    def leader(self) -> Leader | None:
        """None while another pod leads."""
        return self._leader

    @property
    def restarts(self) -> int:
        """Restarts of this pod's coordinators, including those of earlier terms."""
        return self._earlier_restarts + (0 if self._leader is None else self._leader.restarts)

    async def lead(self, epoch: int, lifecycle: Lifecycle) -> None:
        """Start a coordinator, which brings engines to ``lifecycle``; a pod that leads keeps its coordinator.

        Raises:
            StaleEpochError: A newer decision is known, or this pod has stepped down in this epoch.
            ConfigurationError: The coordinator's port can't be used.
        """
        async with self._lock:
            facts = self._state.facts
            if epoch < facts.epoch or (epoch == facts.epoch and self._leader is None and epoch > 0):
                raise StaleEpochError("lead", epoch, facts.epoch)
            if self._leader is None:
                self._begin(lifecycle)
                self._state.update(is_settling=True)
                self._settled = asyncio.get_running_loop().call_later(SETTLING_SECONDS, self._settle)
            self._state.update(is_leader=True, epoch=epoch)

    async def step_down(self, epoch: int) -> None:
        """End the coordinator, if there is one; another pod leads from now on.

        Raises:
            StaleEpochError: A newer decision is known.
        """
        async with self._lock:
            if epoch < self._state.facts.epoch:
                raise StaleEpochError("step-down", epoch, self._state.facts.epoch)
            await self._end(epoch)

    async def close(self) -> None:
        """End the coordinator at once."""
        self._settle()
        if self._leader is not None:
            await self._leader.close()

    async def stop(self) -> None:
        """End the coordinator when the pod ends."""
        async with self._lock:
            if self._leader is not None:
                await self._leader.stop()

    def _settle(self) -> None:
        if self._settled is not None:
            self._settled.cancel()
        self._state.update(is_settling=False)

    def _begin(self, lifecycle: Lifecycle) -> None:
        # Imported here: a launcher starts its ranks before it imports the modules of a leader.
        from megatron_runtime.launch.leader import Leader

        leader = Leader(
            self._options,
            self._state,
            key=self._key,
            lifecycle=lifecycle,
            on_failure=self._on_failure,
            on_change=self._on_change,
        )
        leader.start()
        self._leader = leader
        logger.info("this pod leads: the coordinator is at %s", leader.address)

    async def _end(self, epoch: int) -> None:
        self._settle()
        leader, self._leader = self._leader, None
        if leader is not None:
            logger.info("stepping down: another pod leads from now on")
            self._earlier_restarts += leader.restarts
            await leader.stop()
        self._state.update(is_leader=False, epoch=epoch, engine_state=None, auto_suspended=False, replica_groups=())
