"""Decides whether a request may go to the engines now, must wait, or is turned away."""

from __future__ import annotations

import asyncio
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
FROZEN_STATES = (EngineState.PAUSED, EngineState.SUSPENDED)
REFUSING_STATES = (EngineState.STOPPING, EngineState.STOPPED)


class Abandonable(Protocol):
    """A request in flight."""

    @property
    def size(self) -> int:
        """How many answers it works on."""
        ...

    def abandon(self, error: ApiError) -> None:
        """Ends it with an error now."""
        ...


class AdmissionController:
    """Follows the service's state and knows the requests in flight.

    Paused and suspended engines take requests: those wait in the engines' queues.
    """

    def __init__(self, client: InferenceClient, *, replica_wait: float, retry_after: int, max_in_flight: int) -> None:
        self._client = client
        self._max_in_flight = max_in_flight
        self._waiting = 0
        self._working = 0
        self._replica_wait = replica_wait
        self._retry_after = retry_after
        self._service: ServiceState | None = None
        self._changed = Notifier()
        self._watcher: asyncio.Task[None] | None = None
        self._in_flight: set[Abandonable] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False

    def start(self) -> None:
        """Begins to follow the service's state."""
        self._watcher = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        """Ends what ``start`` began."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)

    @property
    def is_ready(self) -> bool:
        """Whether a request sent now would be taken."""
        return not self._draining and self._has_replica() and not self._is_refusing()

    async def admit(self, answers: int) -> None:
        """Returns once there is a replica for a request for so many answers.

        Raises:
            ApiError: 503 when the request is turned away whatever it asks for, 429 while there are too many others.
        """
        self._refuse_if_closed()
        self._refuse_if_full(answers)
        if not self._has_replica():
            await self._wait_for_replica(answers)

    def enter(self, request: Abandonable) -> None:
        """Counts a request in."""
        self._in_flight.add(request)
        self._working += request.size
        self._idle.clear()

    def leave(self, request: Abandonable) -> None:
        """Counts it out."""
        self._in_flight.remove(request)
        self._working -= request.size
        if not self._in_flight:
            self._idle.set()

    async def drain(self, *, refuse: bool = True) -> None:
        """Turns new requests away from now on, and returns when those in flight have ended.

        Without ``refuse`` those that are in flight to it are taken, for a server that takes no new connections.
        A paused engine would answer nothing before it is too late: its requests end now, so that they can be retried.
        """
        self._draining = refuse
        self._changed.notify()
        frozen_watch = asyncio.create_task(self._abandon_when_frozen())
        await self._idle.wait()
        frozen_watch.cancel()

    def abandon(self) -> None:
        """Ends the requests in flight with an error, for a drain that takes too long."""
        for request in self._in_flight:
            request.abandon(self._shutting_down())

    async def _abandon_when_frozen(self) -> None:
        while not self._is_frozen():
            await self._changed.wait()
        self.abandon()

    async def _wait_for_replica(self, answers: int) -> None:
        self._waiting += answers
        try:
            async with asyncio.timeout(self._replica_wait):
                while not self._has_replica():
                    await self._changed.wait()
                    self._refuse_if_closed()
        except TimeoutError:
            message = f"no replica of the model has registered within {self._replica_wait:.0f} seconds"
            raise unavailable(message, retry_after=self._retry_after, code="no_replica") from None
        finally:
            self._waiting -= answers

    def _refuse_if_closed(self) -> None:
        if self._draining:
            raise self._shutting_down()
        if self._is_refusing():
            raise unavailable("the model is stopped", retry_after=self._retry_after, code="stopped")

    def _refuse_if_full(self, answers: int) -> None:
        others = self._waiting + self._working
        # A request for more answers than that is taken while it is alone: it would never be otherwise.
        if others and others + answers > self._max_in_flight:
            message = f"{others} answers are being worked on, and {self._max_in_flight} may be; try again later"
            raise ApiError(429, message, kind="rate_limit_error", code="queue_full", retry_after=self._retry_after)

    def _shutting_down(self) -> ApiError:
        return unavailable("the server is shutting down", retry_after=self._retry_after, code="draining")

    def _has_replica(self) -> bool:
        return self._service is not None and bool(self._service.engines)

    def _is_refusing(self) -> bool:
        return self._service is not None and self._service.state in REFUSING_STATES

    def _is_frozen(self) -> bool:
        return self._service is not None and self._service.state in FROZEN_STATES

    async def _watch(self) -> None:
        while True:
            revision = -1 if self._service is None else self._service.revision
            try:
                self._service = await self._client.wait_for_state_change(revision, POLL_SECONDS)
            except (MegatronInferenceError, TimeoutError) as error:
                logger.warning("the coordinator does not answer: %s", error)
                await asyncio.sleep(RETRY_SECONDS)
            self._changed.notify()
