"""The processes of a leader besides ranks and frontends: the coordinator, and the connection to it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from megatron_runtime.data_parallel_inference_coordinator.supervised_coordinator import SupervisedCoordinator
from megatron_runtime.inference_client import InferenceClient
from megatron_runtime.launch.engine_link import EngineLink
from megatron_runtime.launch.identity import Lifecycle
from megatron_runtime.launch.options import LaunchOptions
from megatron_runtime.launch.pod_state import PodState
from megatron_runtime.launch.ports import bind_coordinator
from megatron_runtime.launch.tasks import coordinator_options
from megatron_runtime.processes.hang_detection import BLOCKED_SECONDS
from megatron_runtime.processes.supervisor import ChildEnd

COORDINATOR_GRACE = 2.0
COORDINATOR_HANG = 8.0
"""Maximum time without a heartbeat after which the coordinator is replaced: its work takes short times only, its peers
restore its state, and all requests wait for it."""


class Leader:
    """The coordinator of one term as the leader; a pod that leads again gets a new object.

    Args:
        lifecycle: The state that the engines are brought to when they register.
        on_failure: Called with the end of a coordinator that can't work with its options.
        on_change: Called when the coordinator starts or ends.

    Raises:
        ConfigurationError: The coordinator's port can't be used; names the flag.
    """

    def __init__(
        self,
        options: LaunchOptions,
        state: PodState,
        *,
        key: str | None,
        lifecycle: Lifecycle,
        on_failure: Callable[[ChildEnd], None],
        on_change: Callable[[], None],
    ) -> None:
        self._on_failure = on_failure
        self._on_change = on_change
        # A probe only: the coordinator binds the port itself, also after a restart.
        with bind_coordinator(options) as probe:
            port = int(probe.getsockname()[1])
        self.address = f"tcp://{options.private_host}:{port}"
        """Address of this pod's coordinator."""
        self._client = InferenceClient(self.address, key=key, strict_signals=True)
        self.link = EngineLink(self._client, state, lifecycle, options.auto_suspend_after or None)
        self._coordinator = SupervisedCoordinator(
            coordinator_options(options, port),
            key=key,
            current_state=lambda: self.link.target,
            hang_timeout=min(options.hang_timeout, COORDINATOR_HANG),
            blocked_timeout=BLOCKED_SECONDS,
            ends_when_parent_hangs=not options.identity.is_standalone,
            on_end=self._coordinator_ended,
            on_change=self._note_coordinator,
        )
        self._link_run: asyncio.Task[None] | None = None

    @property
    def restarts(self) -> int:
        """Number of restarts of the coordinator."""
        return self._coordinator.restarts

    def start(self) -> None:
        """Starts the coordinator and connects to it."""
        self._client.start()
        self._coordinator.start()
        self._link_run = asyncio.create_task(self.link.run())

    async def stop(self) -> None:
        """Stops the coordinator, then the rest."""
        await self._coordinator.stop(COORDINATOR_GRACE)
        await self.close()

    async def close(self) -> None:
        """Ends everything at once."""
        await self._coordinator.close()
        if self._link_run is not None:
            self._link_run.cancel()
            await asyncio.gather(self._link_run, return_exceptions=True)
        self._client.stop()

    def _coordinator_ended(self, end: ChildEnd) -> None:
        if end.is_bad_input:
            self._on_failure(end)

    def _note_coordinator(self) -> None:
        if not self._coordinator.is_alive:
            self.link.forget()
        self._on_change()
