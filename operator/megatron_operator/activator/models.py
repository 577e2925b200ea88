"""The models behind an activator, as their resources describe them."""

from __future__ import annotations

import http
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from megatron_operator.activator.meters import ActivatorMeters
from megatron_operator.activator.refusal import Refusal, unavailable
from megatron_operator.activator.shared_calls import SharedCalls
from megatron_operator.api.quantity import Duration
from megatron_operator.api.v1alpha1 import ConditionType, Lifecycle
from megatron_operator.idle_stop import LOOK_INTERVAL, is_idle
from megatron_operator.observed_state import AdapterError
from megatron_operator.status import old_status
from megatron_operator.timestamps import seconds, timestamp

POLL = 1.0
"""Seconds between two looks at a model that requests wait for."""

Object = Mapping[str, Any]
logger = logging.getLogger("megatron_operator.activator")


class Availability(StrEnum):
    """Whether a model answers requests."""

    ABSENT = "Absent"
    AVAILABLE = "Available"
    WAITING = "Waiting"
    """It starts, or will."""
    IDLE = "Idle"
    """It was stopped because it was idle; nothing has started it since."""
    STOPPED = "Stopped"
    """Its user stopped it."""


@dataclass(frozen=True)
class ModelKey:
    """Namespace and name of a resource."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class Resources(Protocol):
    """The part of the API server's client that an activator needs."""

    async def get(self, kind: str, namespace: str, name: str) -> Object | None:
        """None when the object does not exist. Raises AdapterError."""
        ...

    async def patch_status(self, obj: Object, patch: Object) -> Object | None:
        """None when the object is gone or replaced. Raises AdapterError."""
        ...


@dataclass(frozen=True)
class Look:
    """A model at one time."""

    resource: Object
    availability: Availability

    @property
    def is_available(self) -> bool:
        """Whether it answers requests."""
        return self.availability is Availability.AVAILABLE


def availability(resource: Object | None) -> Availability:
    """What the resource says about its model. One that the operator has not seen yet will start."""
    if resource is None or resource["metadata"].get("deletionTimestamp"):
        return Availability.ABSENT
    if (resource.get("spec") or {}).get("lifecycle") == Lifecycle.STOPPED:
        return Availability.STOPPED
    status = old_status(resource)
    if is_idle(status):
        return Availability.IDLE
    ready = status.condition(ConditionType.READY)
    # Unknown means that the operator does not reach the leader, which may serve all the same.
    is_running = status.idle_stop_time is None and ready is not None and ready.status != "False"
    return Availability.AVAILABLE if is_running else Availability.WAITING


def may_stop(resource: Object) -> bool:
    """Whether the model may be stopped because it is idle."""
    text = ((resource.get("spec") or {}).get("autoSuspend") or {}).get("stopAfter", "0s")
    try:
        return Duration(str(text)) > 0
    except ValueError:
        return False


class Models:
    """Finds models and starts them. All requests for a model share one look at its resource at a time."""

    def __init__(self, resources: Resources, meters: ActivatorMeters | None = None) -> None:
        self._resources = resources
        self._meters = meters or ActivatorMeters()
        self._running_until: dict[ModelKey, float] = {}
        """By model, the time until which it is not stopped for being idle. A running model thus costs the API server
        one request in this time."""
        self._last: dict[ModelKey, tuple[float, Look]] = {}
        """The last look at each model, and its time. Models that will not answer are looked at for each request."""
        self._looks = SharedCalls[Look | None]("look at")
        self._starts = SharedCalls[None]("start")

    async def is_running(self, key: ModelKey) -> bool:
        """Whether a request may be sent to the model now: it is not about to be stopped.

        Raises Refusal for a resource that does not exist, or that its user stopped, and AdapterError. A model that is
        never stopped for being idle gets requests while the API server does not answer, too.
        """
        if self._running_until.get(key, 0.0) >= time.monotonic():
            return True
        try:
            await self.recent(key)
        except AdapterError:
            _, last = self._last.get(key, (0.0, None))
            if last is None or may_stop(last.resource):
                raise
        return key in self._running_until

    async def activate(self, key: ModelKey) -> bool:
        """Start the model if it was stopped because it was idle. Returns whether it answers requests now.

        Raises as ``look``.
        """
        look = await self.look(key)
        if look.availability is Availability.IDLE:
            await self._starts.get(key, lambda: self._start(key, look.resource))
        return look.is_available

    def last(self, key: ModelKey) -> Look | None:
        """The last look at a model that exists, at most ``LOOK_INTERVAL`` seconds old where ``is_running``."""
        _, look = self._last.get(key, (0.0, None))
        return look

    async def recent(self, key: ModelKey) -> Look:
        """The model within the last ``POLL`` seconds, so that refused requests cost the API server little.

        Raises as ``look``.
        """
        looked_at, last = self._last.get(key, (0.0, None))
        return last if last is not None and time.monotonic() < looked_at + POLL else await self.look(key)

    async def look(self, key: ModelKey) -> Look:
        """The model now. Raises Refusal for one that is absent or that its user stopped, AdapterError."""
        found = await self._looks.get(key, lambda: self._look(key))
        if found is None:
            raise Refusal(f"there is no MegatronInference {key}", http.HTTPStatus.NOT_FOUND)
        if found.availability is Availability.STOPPED:
            raise unavailable(f"the model {key} is stopped (spec.lifecycle); set it to Running to start it")
        return found

    async def close(self) -> None:
        """Cancel open requests to the API server."""
        await self._looks.close()
        await self._starts.close()

    async def _look(self, key: ModelKey) -> Look | None:
        looked_at = time.monotonic()
        resource = await self._resources.get("MegatronInference", key.namespace, key.name)
        found = availability(resource)
        if found in (Availability.ABSENT, Availability.STOPPED, Availability.IDLE):
            self._running_until.pop(key, None)
        else:
            self._running_until[key] = looked_at + LOOK_INTERVAL
        self._last.pop(key, None)
        if resource is None or found is Availability.ABSENT:
            return None
        look = Look(resource, found)
        if found is not Availability.STOPPED:
            self._last[key] = looked_at, look
        return look

    async def _start(self, key: ModelKey, resource: Object) -> None:
        logger.info("%s: a request arrived; its pods start", key)
        stopped = seconds(old_status(resource).idle_stop_time or timestamp(0))
        # The clocks of activator and operator may differ.
        await self._resources.patch_status(resource, {"activationTime": timestamp(max(time.time(), stopped))})
        self._meters.started(key.namespace, key.name)
