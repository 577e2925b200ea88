"""What runs in the leader's pod besides ranks: the coordinator, the frontends, and the line to the engines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from megatron_runtime.data_parallel_inference_coordinator.kept_coordinator import KeptCoordinator
from megatron_runtime.inference_client import InferenceClient
from megatron_runtime.launch.engine_link import EngineLink
from megatron_runtime.launch.keeper import ChildEnd
from megatron_runtime.launch.metrics_folder import MetricsFolder
from megatron_runtime.launch.options import LaunchOptions
from megatron_runtime.launch.pod_state import PodState
from megatron_runtime.launch.ports import bind_coordinator, bind_http
from megatron_runtime.launch.tasks import coordinator_options
from megatron_runtime.server.frontend_group import FrontendGroup
from megatron_runtime.server.options import FrontendOptions

COORDINATOR_GRACE = 2.0


class Leader:
    """Binds its ports when it is made, so that a port that is taken is known before anything else happens.

    Args:
        on_failure: Called with the end of a process that can't work with its options.
        on_change: Called when a process came, went, or began to serve.

    Raises:
        ConfigurationError: A port can't be used; names the flag.
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
        self.key = key
        """The secret that everybody needs who talks to the coordinator."""
        self._on_failure = on_failure
        self._on_change = on_change
        self._http = bind_http(options)
        # Only a look: the coordinator binds it itself, and a restarted one must be able to bind it again.
        with bind_coordinator(options) as probe:
            coordinator_port = int(probe.getsockname()[1])
        self.address = f"tcp://{options.private_host}:{coordinator_port}"
        """Where engines and clients find the coordinator."""
        self.metrics_folder = MetricsFolder()
        self._client = InferenceClient(self.address, key=key)
        self.link = EngineLink(self._client, state, options.identity.lifecycle, options.auto_suspend_after or None)
        self._coordinator = KeptCoordinator(
            coordinator_options(options, coordinator_port),
            key=key,
            current_state=lambda: self.link.wish.name,
            hang_timeout=options.hang_timeout,
            on_end=self._coordinator_ended,
            on_change=self._note_coordinator,
        )
        self._frontends: FrontendGroup | None = None
        self._link_run: asyncio.Task[None] | None = None

    @property
    def http_address(self) -> tuple[str, int]:
        """Host and port of the OpenAI endpoint."""
        name = self._http.getsockname()
        return str(name[0]), int(name[1])

    @property
    def restarts(self) -> int:
        """Restarts of the coordinator and the frontends."""
        return self._coordinator.restarts + (0 if self._frontends is None else self._frontends.restarts)

    def start(self, tokenizer_path: str, max_sequence_length: int) -> None:
        """Starts the processes."""
        self._client.start()
        self._coordinator.start()
        self._link_run = asyncio.create_task(self.link.run())
        keys = self._options.identity.api_keys_file
        options = FrontendOptions(
            coordinator_address=self.address,
            tokenizer_path=tokenizer_path,
            served_name=self._options.model_name,
            max_sequence_length=max_sequence_length,
            replicas=self._options.frontend_replicas,
            request_timeout=self._options.request_timeout,
            api_keys_file=None if keys is None else str(keys),
            metrics_folder=str(self.metrics_folder.path),
            http=self._options.http,
        )
        self._frontends = FrontendGroup(
            options,
            self._http,
            key=self.key,
            hang_timeout=self._options.hang_timeout,
            on_change=self._note_frontends,
        )
        self._frontends.start()

    async def drain_frontends(self, timeout: float) -> None:
        """New requests get 503 while those in flight end, at most ``timeout`` seconds; then the port is closed."""
        if self._frontends is not None:
            await self._frontends.drain(timeout)

    async def stop_coordinator(self) -> None:
        """Ends the coordinator for good."""
        await self._coordinator.stop(COORDINATOR_GRACE)

    async def close(self) -> None:
        """Ends what is left, at once."""
        if self._frontends is not None:
            await self._frontends.stop()
        await self._coordinator.close()
        if self._link_run is not None:
            self._link_run.cancel()
            await asyncio.gather(self._link_run, return_exceptions=True)
        self._client.stop()
        self._http.close()
        self.metrics_folder.close()

    def _coordinator_ended(self, end: ChildEnd) -> None:
        if end.is_bad_input:
            self._on_failure(end)

    def _note_coordinator(self) -> None:
        if not self._coordinator.is_alive:
            self.link.forget()
        self._on_change()

    def _note_frontends(self) -> None:
        assert self._frontends is not None
        self._state.update(frontends_listening=self._frontends.listening)
        if (failure := self._frontends.failure) is not None:
            self._on_failure(failure)
        self._on_change()
