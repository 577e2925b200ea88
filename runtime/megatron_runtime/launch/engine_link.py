"""The leader's connection to the coordinator: copies the state of the engines to the pod's state, and sends signals."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from megatron_runtime.errors import CoordinatorError, MegatronInferenceError
from megatron_runtime.headers import EngineState, Headers
from megatron_runtime.inference_client import InferenceClient
from megatron_runtime.launch.auto_suspend import AutoSuspend
from megatron_runtime.launch.identity import Lifecycle
from megatron_runtime.launch.pod_state import PodState, RegisteredReplicaGroup
from megatron_runtime.lifecycle import TARGET_OF_STATE, CoordinatorState
from megatron_runtime.wire.service_state import ServiceState

logger = logging.getLogger(__name__)

LOAD_SECONDS = 1.0
"""Maximum age of the engines' load."""
RETRY_SECONDS = 0.5
AUTO_SUSPEND_TIMEOUT = 120.0
"""Seconds that engines get to carry out a signal of the automatic suspension."""
EARLY_SECONDS = 0.5
"""Seconds for which a signal that the caller does not wait for is watched for a refusal."""


class EngineLink:
    """Keeps the pod's state up to date with the service's, and sends signals.

    ``suspend_after`` is the time in seconds without a request after which the engines are suspended until the next
    one; None disables that.
    """

    def __init__(
        self, client: InferenceClient, state: PodState, lifecycle: Lifecycle, suspend_after: float | None = None
    ) -> None:
        self._client = client
        self._calls: Mapping[Headers, Callable[..., Awaitable[None]]] = {
            Headers.PAUSE: client.pause_engines,
            Headers.UNPAUSE: client.unpause_engines,
            Headers.SUSPEND: client.suspend_engines,
            Headers.RESUME: client.resume_engines,
            Headers.STOP: client.stop_engines,
        }
        self._state = state
        self._sending: set[asyncio.Task[object]] = set()
        self._auto_suspend = None if suspend_after is None else AutoSuspend(suspend_after, self._send_for_auto_suspend)
        self.target = CoordinatorState[lifecycle.name]
        """The initial state of a coordinator that replaces the present one."""

    async def run(self) -> None:
        """Watches the service until cancelled."""
        try:
            await self._watch()
        finally:
            if self._auto_suspend is not None:
                self._auto_suspend.stop()

    async def _watch(self) -> None:
        revision = -1
        while True:
            try:
                service = await self._client.wait_for_state_change(revision, LOAD_SECONDS)
            except (MegatronInferenceError, TimeoutError) as error:
                logger.debug("the coordinator does not answer: %s", error)
                self.forget()
                await asyncio.sleep(RETRY_SECONDS)
                continue
            revision = service.revision
            self._note(service)

    def forget(self) -> None:
        """Drop the reports of a coordinator that is gone; signals fail until engines register with the next one."""
        self._state.update(engine_state=None, replica_groups=())

    async def send(self, signal: Headers, *, timeout: float, wait: bool) -> None:
        """See ``control_api.SignalSender``."""
        was_suspended = self._auto_suspend is not None and self._auto_suspend.override()
        self._state.update(auto_suspended=False)
        if was_suspended and signal is Headers.SUSPEND and self.target is CoordinatorState.SUSPENDED:
            return  # The engines are suspended already, and stay suspended.
        await self._send_signal(signal, timeout=timeout, wait=wait)

    async def update_weights(self, path: str, *, timeout: float, wait: bool) -> None:
        """See ``control_api.SignalSender``."""
        await self._send("update_weights", partial(self._client.update_weights, path), timeout=timeout, wait=wait)

    async def profile(self, *, start: bool) -> None:
        """See ``control_api.SignalSender``."""
        call = self._client.start_cuda_profiler if start else self._client.stop_cuda_profiler
        await call()

    async def _send_for_auto_suspend(self, signal: Headers) -> None:
        await self._send_signal(signal, timeout=AUTO_SUSPEND_TIMEOUT, wait=True)

    async def _send_signal(self, signal: Headers, *, timeout: float, wait: bool) -> None:
        await self._send(signal.name.lower(), self._calls[signal], timeout=timeout, wait=wait)

    async def _send(self, name: str, call: Callable[..., Awaitable[object]], *, timeout: float, wait: bool) -> None:
        if not self._state.facts.replica_groups:
            raise CoordinatorError(f"{name}: no engine is registered with the coordinator")
        task: asyncio.Task[object] = asyncio.create_task(self._call(name, call, timeout))
        self._sending.add(task)
        task.add_done_callback(self._sent)
        done, _ = await asyncio.wait({task}, timeout=None if wait else EARLY_SECONDS)
        if done:
            task.result()

    async def _call(self, name: str, call: Callable[..., Awaitable[object]], timeout: float) -> None:
        try:
            async with asyncio.timeout(timeout + RETRY_SECONDS):
                await call(timeout=timeout)
        except TimeoutError as error:
            if isinstance(error, MegatronInferenceError):
                raise
            raise CoordinatorError(f"{name}: the coordinator did not answer within {timeout:.0f} s") from error
        self._note(await self._client.service_state())

    def _sent(self, task: asyncio.Task[object]) -> None:
        self._sending.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning("a signal failed: %s", error)

    def _note(self, service: ServiceState) -> None:
        state = EngineState(service.state)
        if (target := TARGET_OF_STATE[state]) is not CoordinatorState.STOPPING:
            self.target = target
        groups = tuple(
            RegisteredReplicaGroup(
                index=engine.replica_group,
                state=engine.state,
                running_requests=engine.running,
                waiting_requests=engine.waiting,
                kv_blocks_total=engine.kv_blocks_total,
                kv_blocks_used=engine.kv_blocks_used,
                weight_version=engine.weight_version,
                prompt_tokens=engine.prompt_tokens,
                generated_tokens=engine.generated_tokens,
                draft_tokens=engine.draft_tokens,
                accepted_draft_tokens=engine.accepted_draft_tokens,
            )
            for engine in sorted(service.engines, key=lambda engine: engine.replica_group)
        )
        self._state.update(
            engine_state=state.value if groups else None,
            replica_groups=groups,
            is_settling=self._state.facts.is_settling and not groups,
            dropped_messages=service.dropped_messages,
        )
        if self._auto_suspend is not None:
            self._auto_suspend.observe(service)
            self._state.update(auto_suspended=self._auto_suspend.is_suspended)
