"""Admission control: a request goes to the engines now, waits for a replica group, or is rejected."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Protocol

from megatron_runtime.errors import MegatronInferenceError
from megatron_runtime.headers import EngineState
from megatron_runtime.inference_client import InferenceClient
from megatron_runtime.notifier import Notifier
from megatron_runtime.server.errors import ApiError, unavailable
from megatron_runtime.wire.service_state import ServiceState

logger = logging.getLogger(__name__)

POLL_SECONDS = 30.0
RETRY_SECONDS = 1.0
PAUSED_STATES = (EngineState.PAUSED, EngineState.SUSPENDED)
REFUSING_STATES = (EngineState.STOPPING, EngineState.STOPPED)


class InFlightRequest(Protocol):
    """A request in flight."""

    @property
    def size(self) -> int:
        """Number of answers that it generates."""
        ...

    def abort(self, error: ApiError) -> None:
        """Ends it with this error now."""
        ...


class AdmissionController:
    """Follows the state of the service and tracks the requests in flight.

    Requests are admitted while the engines are paused or suspended; they wait in the engines' queues.
    """

    def __init__(
        self, client: InferenceClient, *, replica_group_wait: float, retry_after: int, max_in_flight: int
    ) -> None:
        self._client = client
        self._max_in_flight = max_in_flight
        self._waiting = 0
        self._working = 0
        self._replica_group_wait = replica_group_wait
        self._retry_after = retry_after
        self._service: ServiceState | None = None
        self._changed = Notifier()
        self._watcher: asyncio.Task[None] | None = None
        self._in_flight: set[InFlightRequest] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False

    def start(self) -> None:
        """Starts to follow the state of the service."""
        self._watcher = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        """Stops following the state of the service."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)

    @property
    def is_ready(self) -> bool:
        """Whether a request would be admitted now."""
        return not self._draining and self._has_replica_group() and not self._is_refusing()

    @property
    def adapters(self) -> dict[str, str] | None:
        """Names and paths of the adapters that requests can name; None while no replica group is registered."""
        if self._service is None or not self._service.engines:
            return None
        return {adapter.name: adapter.path for adapter in self._service.adapters}

    async def refresh(self, seconds: float | None = None) -> None:
        """Requests the state of the service, which may be newer than the last one that was reported.

        The last one stays without an answer in this time; None: in that of the client.
        """
        with contextlib.suppress(MegatronInferenceError):
            self._service = await self._client.service_state(seconds)

    @property
    def load(self) -> int:
        """Number of answers in flight or waiting in this frontend."""
        return self._waiting + self._working

    async def admit(self, answers: int) -> None:
        """Returns once a replica group can serve a request with this number of answers.

        Raises:
            ApiError: 503 when the service accepts no requests, 429 while too many answers are in flight.
        """
        self._refuse_if_closed()
        self._refuse_if_full(answers)
        if not self._has_replica_group():
            await self._wait_for_replica_group(answers)

    def enter(self, request: InFlightRequest) -> None:
        """Adds a request to those in flight."""
        self._in_flight.add(request)
        self._working += request.size
        self._idle.clear()

    def leave(self, request: InFlightRequest) -> None:
        """Removes a request from those in flight."""
        self._in_flight.remove(request)
        self._working -= request.size
        if not self._in_flight:
            self._idle.set()

    def refuse(self) -> None:
        """Rejects new requests from now on."""
        self._draining = True
        self._changed.notify()

    async def drain(self) -> None:
        """Returns when the requests in flight have ended. Those of a paused engine would outlast the drain, so they are
        aborted now and the client can retry them elsewhere.

        Without ``refuse`` new requests are still admitted, for a server that accepts no new connections but still reads
        requests from open ones.
        """
        pause_watch = asyncio.create_task(self._abort_when_paused())
        await self._idle.wait()
        pause_watch.cancel()

    def abort(self) -> None:
        """Aborts the requests in flight, for a drain that takes too long."""
        for request in self._in_flight:
            request.abort(self._shutting_down())

    async def _abort_when_paused(self) -> None:
        while not self._is_paused():
            await self._changed.wait()
        self.abort()

    async def _wait_for_replica_group(self, answers: int) -> None:
        self._waiting += answers
        try:
            async with asyncio.timeout(self._replica_group_wait):
                while not self._has_replica_group():
                    await self._changed.wait()
                    self._refuse_if_closed()
        except TimeoutError:
            message = f"no replica group has registered within {self._replica_group_wait:.0f} seconds"
            raise unavailable(message, retry_after=self._retry_after, code="no_replica_group") from None
        finally:
            self._waiting -= answers

    def _refuse_if_closed(self) -> None:
        if self._draining:
            raise self._shutting_down()
        if self._is_refusing():
            raise unavailable("the model is stopped", retry_after=self._retry_after, code="stopped")

    def _refuse_if_full(self, answers: int) -> None:
        others = self.load
        # A request for more answers than the limit is admitted only when no other request is in flight.
        if others and others + answers > self._max_in_flight:
            message = f"{others} answers are in flight, and at most {self._max_in_flight} may be; retry later"
            raise ApiError(429, message, kind="rate_limit_error", code="queue_full", retry_after=self._retry_after)

    def _shutting_down(self) -> ApiError:
        return unavailable("the server is shutting down", retry_after=self._retry_after, code="draining")

    def _has_replica_group(self) -> bool:
        return self._service is not None and bool(self._service.engines)

    def _is_refusing(self) -> bool:
        return self._service is not None and self._service.state in REFUSING_STATES

    def _is_paused(self) -> bool:
        return self._service is not None and self._service.state in PAUSED_STATES

    async def _watch(self) -> None:
        while True:
            revision = -1 if self._service is None else self._service.revision
            try:
                self._service = await self._client.wait_for_state_change(revision, POLL_SECONDS)
            except (MegatronInferenceError, TimeoutError) as error:
                logger.warning("the coordinator does not answer: %s", error)
                await asyncio.sleep(RETRY_SECONDS)
            self._changed.notify()
