"""What runs in the pod that leads besides ranks and frontends: the coordinator, and the line to the engines."""

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
from megatron_runtime.processes.supervisor import ChildEnd

COORDINATOR_GRACE = 2.0
COORDINATOR_HANG = 8.0
"""Seconds of silence after which a coordinator is replaced at the latest: nothing that it does takes long, others can
tell it again what it holds, and everybody waits for it."""


class Leader:
    """One time of leading; a pod that leads again gets another one.

    Args:
        lifecycle: The wish that the engines are brought to as they register.
        on_failure: Called with the end of a coordinator that can't work with its options.
        on_change: Called when the coordinator came or went.

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
        # Only a look: the coordinator binds it itself, and a restarted one must be able to bind it again.
        with bind_coordinator(options) as probe:
            port = int(probe.getsockname()[1])
        self.address = f"tcp://{options.private_host}:{port}"
        """Where this very coordinator is."""
        self._client = InferenceClient(self.address, key=key, strict_signals=True)
        self.link = EngineLink(self._client, state, lifecycle, options.auto_suspend_after or None)
        self._coordinator = SupervisedCoordinator(
            coordinator_options(options, port),
            key=key,
            current_state=lambda: self.link.target,
            hang_timeout=min(options.hang_timeout, COORDINATOR_HANG),
            ends_when_parent_hangs=not options.identity.is_standalone,
            on_end=self._coordinator_ended,
            on_change=self._note_coordinator,
        )
        self._link_run: asyncio.Task[None] | None = None

    @property
    def restarts(self) -> int:
        """How often the coordinator was started again."""
        return self._coordinator.restarts

    def start(self) -> None:
        """Starts the process."""
        self._client.start()
        self._coordinator.start()
        self._link_run = asyncio.create_task(self.link.run())

    async def stop(self) -> None:
        """Ends the coordinator as it likes to end, then the rest."""
        await self._coordinator.stop(COORDINATOR_GRACE)
        await self.close()

    async def close(self) -> None:
        """Ends what is left, at once."""
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
