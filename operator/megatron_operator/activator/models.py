"""The models behind an activator, as their resources describe them."""

from __future__ import annotations

import asyncio
import http
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from megatron_operator.api.v1alpha1 import ConditionType, Lifecycle
from megatron_operator.idle_stop import LOOK_INTERVAL, is_idle
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


class ModelUnavailable(Exception):
    """The model will not answer. ``status`` is that of the HTTP answer, ``str()`` its message."""

    def __init__(self, message: str, status: http.HTTPStatus) -> None:
        super().__init__(message)
        self.status = status


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


class Models:
    """Finds models and starts them. All requests for a model share one look at its resource at a time."""

    def __init__(self, resources: Resources) -> None:
        self._resources = resources
        self._running_until: dict[ModelKey, float] = {}
        """By model, the time until which it is not stopped for being idle. A running model thus costs the API server
        one request in this time."""
        self._looks: dict[ModelKey, asyncio.Task[Availability]] = {}

    async def check(self, key: ModelKey) -> bool:
        """Whether a request may be sent to the model now: it is not about to be stopped. Otherwise it is started.

        Raises ModelUnavailable for a resource that does not exist, or that its user stopped, and AdapterError.
        """
        if self._running_until.get(key, 0.0) >= time.monotonic():
            return True
        await self.activate(key)
        return key in self._running_until

    async def activate(self, key: ModelKey) -> bool:
        """Start the model if it was stopped because it was idle. Returns whether it answers requests now.

        Raises ModelUnavailable for a model that is absent or that its user stopped, AdapterError.
        """
        look = self._looks.get(key)
        if look is None:
            look = self._looks[key] = asyncio.create_task(self._look(key), name=f"look at {key}")
            look.add_done_callback(lambda _: self._looks.pop(key, None))
        found = await asyncio.shield(look)
        if found is Availability.ABSENT:
            raise ModelUnavailable(f"there is no MegatronInference {key}", http.HTTPStatus.NOT_FOUND)
        if found is Availability.STOPPED:
            words = f"the model {key} is stopped (spec.lifecycle); set it to Running to start it"
            raise ModelUnavailable(words, http.HTTPStatus.SERVICE_UNAVAILABLE)
        return found is Availability.AVAILABLE

    async def close(self) -> None:
        """Cancel open requests to the API server."""
        looks = list(self._looks.values())
        for look in looks:
            look.cancel()
        await asyncio.gather(*looks, return_exceptions=True)

    async def _look(self, key: ModelKey) -> Availability:
        looked_at = time.monotonic()
        resource = await self._resources.get("MegatronInference", key.namespace, key.name)
        found = availability(resource)
        if resource is None or found in (Availability.ABSENT, Availability.STOPPED, Availability.IDLE):
            self._running_until.pop(key, None)
        else:
            self._running_until[key] = looked_at + LOOK_INTERVAL
        if resource is not None and found is Availability.IDLE:
            logger.info("%s: a request arrived; its pods start", key)
            stopped = seconds(old_status(resource).idle_stop_time or timestamp(0))
            # The clocks of activator and operator may differ.
            await self._resources.patch_status(resource, {"activationTime": timestamp(max(time.time(), stopped))})
        return found
