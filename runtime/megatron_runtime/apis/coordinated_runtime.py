"""Coordinator mode of the library API: engine loop, coordinator, client and frontends, on one background event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from megatron_runtime.apis.serve_config import ServeConfig
from megatron_runtime.engine.worker.attach import STOP_SECONDS, AttachedEngine, attach_engine, wait_for_engines
from megatron_runtime.engine.worker.engine_loop import EngineLoop
from megatron_runtime.errors import (
    CoordinatorError,
    EngineError,
    LostRankError,
    MegatronInferenceError,
    TransitionTimeoutError,
)
from megatron_runtime.headers import EngineState, Headers
from megatron_runtime.inference_client import InferenceClient, RequestStream
from megatron_runtime.inference_request import DynamicInferenceRequest
from megatron_runtime.lifecycle import reached_states
from megatron_runtime.model.refit import READ_TIMEOUT, Weights
from megatron_runtime.parallel.timeouts import LOAD_TIMEOUT
from megatron_runtime.parallel.world import World
from megatron_runtime.parallel.world_group import WorldGroup
from megatron_runtime.sampling_params import SamplingParams
from megatron_runtime.server.frontend_group import FrontendGroup
from megatron_runtime.wire.bodies import Prompt

logger = logging.getLogger(__name__)

TRANSITION_SECONDS = 120.0
FRONTEND_SECONDS = 120.0


class CoordinatedRuntime:
    """All its coroutines run on the background event loop.

    Args:
        engine: A DynamicInferenceEngine.
        world: The position of this process among all ranks.
        host: Host of the coordinator, or None.
        port: Port of the coordinator, or None.
        prepare_thread: Called once in every thread that computes.
    """

    def __init__(
        self,
        engine: Any,
        world: World,
        *,
        host: str | None,
        port: int | None,
        prepare_thread: Callable[[], None] | None,
    ) -> None:
        self._engine = engine
        self._world = world
        self._host = host
        self._port = port
        self._prepare_thread = prepare_thread
        # Before the world: the failure of a rank of the same replica group is detected at once.
        engine.controller.model.ranks.barrier("start", LOAD_TIMEOUT)
        self._group = WorldGroup(world)
        self._attached: AttachedEngine | None = None
        self._client: InferenceClient | None = None
        self._watch: asyncio.Task[None] | None = None
        self._frontends: FrontendGroup | None = None
        self.frontend_address: tuple[str, int] | None = None
        """Host and port of the HTTP frontend, or None."""

    async def start(self) -> None:
        """Returns when requests can be served.

        Raises:
            ConfigurationError: The coordinator can't listen at this host.
            CoordinatorError: The coordinator did not start, or not all engines registered in time.
        """
        try:
            self._attached = await attach_engine(
                self._engine,
                hostname=self._host,
                port=self._port,
                prepare_thread=self._prepare_thread,
            )
            watch = self._watch_loop if self._world.is_primary else self._watch_primary
            self._watch = asyncio.create_task(watch())
            if self._world.is_primary:
                self._client = InferenceClient(self._attached.address, key=self._attached.key, strict_signals=True)
                await self._client.start()
                await wait_for_engines(self._client, self._world.replica_groups, self._raise_failure)
        except BaseException:
            await self.close()
            raise

    async def generate(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]
    ) -> list[DynamicInferenceRequest]:
        """The merged requests, in the order of the prompts, the samples of a prompt side by side."""
        client = self._healthy_client()
        pairs = zip(prompts, params, strict=True)
        futures = [client.add_request(prompt, sample) for prompt, param in pairs for sample in param.samples()]
        try:
            results = await asyncio.gather(*futures)
        finally:
            for future in futures:
                future.cancel()  # one request failed: the others are not needed
        return [result.merge() for result in results]

    async def pause(self) -> None:
        """RUNNING -> PAUSED."""
        await self._transition(InferenceClient.pause_engines, Headers.PAUSE)

    async def unpause(self) -> None:
        """PAUSED -> RUNNING."""
        await self._transition(InferenceClient.unpause_engines, Headers.UNPAUSE)

    async def suspend(self) -> None:
        """PAUSED -> SUSPENDED."""
        await self._transition(InferenceClient.suspend_engines, Headers.SUSPEND)

    async def resume(self) -> None:
        """SUSPENDED -> PAUSED."""
        await self._transition(InferenceClient.resume_engines, Headers.RESUME)

    async def update_weights(self, weights: Weights) -> int:
        """Load other weights into this rank's engine; every rank calls it, and returns when all ranks are done."""
        assert self._attached is not None
        try:
            return await self._attached.loop.update_weights(weights)
        finally:
            await asyncio.to_thread(self._group.meet, "update_weights", READ_TIMEOUT)

    async def open_stream(self, prompt: Prompt, params: SamplingParams) -> RequestStream:
        """A streaming request."""
        return self._healthy_client().stream_request(prompt, params)

    async def serve(self, config: ServeConfig) -> None:
        """Start the frontends; returns when they are ready. No effect on ranks other than 0.

        Raises:
            ConfigurationError: The port can't be used, or the tokenizer was not read from a file.
            CoordinatorError: The frontends were not ready in time, or already run.
        """
        if not self._world.is_primary:
            return
        self._healthy_client()
        if self._frontends is not None:
            raise CoordinatorError("the frontend is already running; shut down first")
        assert self._attached is not None
        options = config.frontend_options(
            self._attached.address, self._engine.tokenizer, self._engine.context.max_sequence_length
        )
        self._frontends = FrontendGroup(options, config.listening_socket(), key=self._attached.key)
        self._frontends.start()
        try:
            await self._frontends.wait_ready(FRONTEND_SECONDS)
        except BaseException:
            await self._stop_frontends()
            raise
        self.frontend_address = (config.host, self._frontends.port)

    async def wait_for_shutdown(self) -> None:
        """Returns when the engine has stopped.

        Raises:
            EngineError: The engine loop failed; its failure is the cause.
        """
        assert self._attached is not None
        await asyncio.wait({self._attached.task})
        self._raise_failure()

    async def shutdown(self) -> None:
        """Stop engines, coordinator and frontends; with several ranks, every rank calls it.

        Raises:
            EngineError: The engine of this rank, which is not rank 0, has failed.
        """
        await self._stop_frontends()
        assert self._attached is not None
        if not self._world.is_primary:
            await asyncio.wait({self._attached.task})
            await self.close()
            self._raise_failure()
            return
        if self._client is not None and (self._world.replica_groups > 1 or not self._attached.task.done()):
            with contextlib.suppress(MegatronInferenceError):
                state = await self._client.service_state()
                if state.state == "RUNNING":
                    await self._client.pause_engines()
                await self._client.stop_engines()
                async with asyncio.timeout(TRANSITION_SECONDS):
                    await asyncio.wait({self._attached.task})
                self._client.shutdown_coordinator()
        await asyncio.to_thread(self._group.release_followers)
        await self.close()

    async def close(self) -> None:
        """End everything on this rank now. Idempotent."""
        await self._stop_frontends()
        if self._client is not None:
            self._client.stop()
        if self._attached is not None:
            self._attached.task.cancel()
            await asyncio.wait({self._attached.task})
            if self._attached.coordinator is not None:
                await self._attached.coordinator.stop(STOP_SECONDS)
        if self._watch is not None:
            if not self._world.is_primary:
                self._watch.cancel()
            await asyncio.wait({self._watch})

    async def _stop_frontends(self) -> None:
        if self._frontends is not None:
            await self._frontends.stop()
            self._frontends = None
            self.frontend_address = None

    async def _transition(self, send: Callable[[InferenceClient], Awaitable[None]], signal: Headers) -> None:
        """Rank 0 moves all engines and waits for them. Other ranks wait for their own engine, which may be ahead."""
        assert self._attached is not None
        arrival = reached_states(signal)[-1]
        if self._world.is_primary:
            await send(self._healthy_client())
        try:
            async with asyncio.timeout(TRANSITION_SECONDS):
                if self._world.is_primary:
                    await self._attached.loop.wait_until(arrival)
                elif await self._attached.reached.next_of(arrival, EngineState.STOPPED) is not arrival:
                    self._raise_failure()
                    raise EngineError("the engine loop has stopped")
        except TimeoutError:
            raise TransitionTimeoutError(
                f"the engine of rank {self._world.rank} was not {arrival.value} within {TRANSITION_SECONDS:g} s; it is "
                f"{self._attached.loop.state.value}"
            ) from None

    async def _watch_loop(self) -> None:
        """Fail outstanding requests at once when the only engine fails: no other engine will serve them."""
        assert self._attached is not None
        await asyncio.wait({self._attached.task})
        failure = self._failure()
        if failure is not None and self._client is not None and self._world.replica_groups == 1:
            self._client.fail_outstanding(failure)

    async def _watch_primary(self) -> None:
        """End this rank's engine when rank 0 is lost: there is no coordinator without it."""
        assert self._attached is not None
        try:
            await asyncio.wrap_future(self._group.await_primary())
            await asyncio.wait({self._attached.task}, timeout=STOP_SECONDS)
        except LostRankError as error:
            if isinstance(self._attached.loop, EngineLoop) and not self._attached.loop.ended:
                logger.error("%s", error)
                self._attached.loop.failure = error
        if isinstance(self._attached.loop, EngineLoop):
            self._attached.task.cancel()

    def _healthy_client(self) -> InferenceClient:
        assert self._client is not None
        if self._world.replica_groups == 1:
            self._raise_failure()
        return self._client

    def _failure(self) -> EngineError | None:
        assert self._attached is not None
        if self._attached.loop.failure is None:
            return None
        error = EngineError(f"the engine loop failed: {self._attached.loop.failure!r}")
        error.__cause__ = self._attached.loop.failure
        return error

    def _raise_failure(self) -> None:
        failure = self._failure()
        if failure is not None:
            raise failure
