"""The frontends of a replica group's first pod; they serve requests whether or not this pod leads."""

from __future__ import annotations

from collections.abc import Callable

from megatron_runtime.launch.metrics_folder import MetricsFolder
from megatron_runtime.launch.options import LaunchOptions
from megatron_runtime.launch.pod_state import PodState
from megatron_runtime.launch.ports import bind_http
from megatron_runtime.processes.fork_server import spawner_of
from megatron_runtime.processes.hang_detection import BLOCKED_SECONDS
from megatron_runtime.processes.supervisor import FIRST_START_FACTOR, ChildEnd
from megatron_runtime.server.frontend_group import FRONTEND_MODULE, START_SECONDS, FrontendGroup, process_environment
from megatron_runtime.server.options import FrontendOptions

FRONTEND_HANG = 10.0
"""Maximum time without a heartbeat after which a frontend is replaced: its event loop does short work only, and clients
that are connected to it wait."""


class PodFrontends:
    """Binds the port in the constructor, so that a port in use is detected first.

    Args:
        on_failure: Called with the end of a process that can't work with its options.
        on_change: Called when a process starts, ends, or begins to serve.

    Raises:
        ConfigurationError: The port can't be used; names the flag.
    """

    def __init__(
        self,
        options: LaunchOptions,
        state: PodState,
        *,
        on_failure: Callable[[ChildEnd], None],
        on_change: Callable[[], None],
    ) -> None:
        self._options = options
        self._state = state
        self._on_failure = on_failure
        self._on_change = on_change
        self._socket = bind_http(options)
        self.metrics_folder = MetricsFolder()
        self._spawner = spawner_of(
            "fork server of the frontends",
            FRONTEND_MODULE,
            process_environment(str(self.metrics_folder.path)),
            hang_timeout=options.hang_timeout,
            start_timeout=FIRST_START_FACTOR * START_SECONDS,
        )
        self._spawner.start()  # A fork server imports modules while the checkpoint is inspected.
        self._group: FrontendGroup | None = None

    @property
    def http_address(self) -> tuple[str, int]:
        """Host and port of the OpenAI endpoint."""
        name = self._socket.getsockname()
        return str(name[0]), int(name[1])

    @property
    def restarts(self) -> int:
        """Number of restarts."""
        return 0 if self._group is None else self._group.restarts

    def start(self, tokenizer_path: str, max_sequence_length: int, *, address: str, key: str | None) -> None:
        """Starts the processes; ``address`` is that of the coordinator, which may move to another pod.

        Raises:
            ConfigurationError: The sampling defaults of the checkpoint are invalid.
        """
        from megatron_runtime.server.generation_config import sampling_defaults  # Imports pydantic.

        keys = self._options.identity.api_keys_file
        options = FrontendOptions(
            coordinator_address=address,
            tokenizer_path=tokenizer_path,
            served_name=self._options.model_name,
            max_sequence_length=max_sequence_length,
            replicas=self._options.frontend_replicas,
            request_timeout=self._options.request_timeout,
            api_keys_file=None if keys is None else str(keys),
            metrics_folder=str(self.metrics_folder.path),
            hands_over=not self._options.identity.is_standalone,
            http=self._options.http,
            lora_modules=dict(self._options.engine.lora_modules),
            max_loras=self._options.engine.max_loras,
            sampling_defaults=sampling_defaults(self._options.http, tokenizer_path),
        )
        self._group = FrontendGroup(
            options,
            self._socket,
            key=key,
            api_keys=self._options.identity.api_keys,
            control_token=self._options.identity.control_token,
            spawner=self._spawner,
            hang_timeout=min(self._options.hang_timeout, FRONTEND_HANG),
            blocked_timeout=BLOCKED_SECONDS,
            on_change=self._note,
        )
        self._group.start()

    async def drain(self, timeout: float) -> None:
        """Refuses new requests, waits up to ``timeout`` seconds for those in flight, and closes the port.

        The state of the pod is ``draining`` once every frontend has begun.
        """
        await self._spawner.close()  # frontends that are about to start do not
        if self._group is not None:
            await self._group.drain(timeout)

    async def close(self) -> None:
        """Ends the remaining processes at once."""
        if self._group is not None:
            await self._group.stop()
        await self._spawner.close()
        self._socket.close()
        self.metrics_folder.close()

    def _note(self) -> None:
        assert self._group is not None
        self._state.update(frontends_listening=self._group.listening)
        if self._group.is_draining:
            self._state.update(draining=True)
        if (failure := self._group.failure) is not None:
            self._on_failure(failure)
        self._on_change()
