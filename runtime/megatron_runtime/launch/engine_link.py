"""The leader's line to the coordinator: what the engines do, and the signals that they are sent."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial

from megatron_runtime.data_parallel_inference_coordinator.states import SETTLED, CoordinatorState
from megatron_runtime.errors import CoordinatorError, MegatronInferenceError
from megatron_runtime.headers import EngineState
from megatron_runtime.inference_client import InferenceClient
from megatron_runtime.launch.auto_suspend import AutoSuspend
from megatron_runtime.launch.identity import Lifecycle
from megatron_runtime.launch.pod_state import PodState, ReplicaState
from megatron_runtime.wire.service_state import ServiceState

logger = logging.getLogger(__name__)

LOAD_SECONDS = 1.0
"""How old the engines' load may get."""
RETRY_SECONDS = 0.5
SLEEP_TIMEOUT = 120.0
"""Seconds that engines get to obey a signal on their way to sleep and back."""
EARLY_SECONDS = 0.5
"""How long a signal that is not waited for is watched for a refusal."""

_WISHES = {
    Lifecycle.RUNNING: CoordinatorState.RUNNING,
    Lifecycle.PAUSED: CoordinatorState.PAUSED,
    Lifecycle.SUSPENDED: CoordinatorState.SUSPENDED,
}


class EngineLink:
    """Keeps the pod's state up to date with the service's, and sends signals.

    ``suspend_after`` are the seconds without a request after which the engines are suspended until the next one; None
    means never.
    """

    def __init__(
        self, client: InferenceClient, state: PodState, lifecycle: Lifecycle, suspend_after: float | None = None
    ) -> None:
        self._client = client
        self._state = state
        self._signals: set[asyncio.Task[object]] = set()
        self._sleep = None if suspend_after is None else AutoSuspend(suspend_after, self._send_for_sleep)
        self.wish = _WISHES[lifecycle]
        """The state that a coordinator that takes over has to start from."""

    async def run(self) -> None:
        """Follows the service until cancelled."""
        try:
            await self._follow()
        finally:
            if self._sleep is not None:
                self._sleep.stop()

    async def _follow(self) -> None:
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
        """What the last coordinator said holds no longer; signals wait until engines register with the next one."""
        self._state.update(engine_state=None, replicas=())

    async def send(self, signal: str, *, timeout: float, wait: bool) -> None:
        """As ``control_api.SignalSender`` says."""
        was_asleep = self._sleep is not None and self._sleep.take_over()
        self._state.update(auto_suspended=False)
        if was_asleep and signal == "suspend" and self.wish is CoordinatorState.SUSPENDED:
            return  # they are there, and stay from now on
        await self._send_signal(signal, timeout=timeout, wait=wait)

    async def update_weights(self, path: str, *, timeout: float, wait: bool) -> None:
        """As ``control_api.SignalSender`` says."""
        await self._send("update_weights", partial(self._client.update_weights, path), timeout=timeout, wait=wait)

    async def _send_for_sleep(self, signal: str) -> None:
        await self._send_signal(signal, timeout=SLEEP_TIMEOUT, wait=True)

    async def _send_signal(self, signal: str, *, timeout: float, wait: bool) -> None:
        await self._send(signal, getattr(self._client, f"{signal}_engines"), timeout=timeout, wait=wait)

    async def _send(self, name: str, call: Callable[..., Awaitable[object]], *, timeout: float, wait: bool) -> None:
        if not self._state.facts.replicas:
            raise CoordinatorError(f"{name}: no engine is registered with the coordinator")
        task: asyncio.Task[object] = asyncio.create_task(self._signal(name, call, timeout))
        self._signals.add(task)
        task.add_done_callback(self._signal_ended)
        done, _ = await asyncio.wait({task}, timeout=None if wait else EARLY_SECONDS)
        if done:
            task.result()

    async def _signal(self, name: str, call: Callable[..., Awaitable[object]], timeout: float) -> None:
        try:
            async with asyncio.timeout(timeout + RETRY_SECONDS):
                await call(timeout=timeout)
        except TimeoutError as error:
            if isinstance(error, MegatronInferenceError):
                raise
            raise CoordinatorError(f"{name}: the coordinator did not answer within {timeout:.0f} s") from error
        self._note(await self._client.service_state())

    def _signal_ended(self, task: asyncio.Task[object]) -> None:
        self._signals.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning("a signal had no effect: %s", error)

    def _note(self, service: ServiceState) -> None:
        state = EngineState(service.state)
        if (settled := SETTLED[state]) is not CoordinatorState.STOPPING:
            self.wish = settled
        replicas = tuple(
            ReplicaState(
                group=engine.group,
                state=engine.state,
                running_requests=engine.running,
                waiting_requests=engine.waiting,
                kv_blocks_total=engine.kv_blocks_total,
                kv_blocks_used=engine.kv_blocks_used,
                weight_version=engine.weight_version,
                prompt_tokens=engine.prompt_tokens,
                generated_tokens=engine.generated_tokens,
            )
            for engine in sorted(service.engines, key=lambda engine: engine.group)
        )
        self._state.update(
            engine_state=state.value if replicas else None,
            replicas=replicas,
            dropped_messages=service.dropped_messages,
        )
        if self._sleep is not None:
            self._sleep.note(service)
            self._state.update(auto_suspended=self._sleep.is_asleep)
