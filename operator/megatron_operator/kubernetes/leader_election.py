"""Leader election by a Lease: one of several operators acts."""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

from megatron_operator.kubernetes.api_server import ApiServer, Json
from megatron_operator.kubernetes.lease import LeaseName, LeaseTimings, LeaseView
from megatron_operator.observed_state import AdapterError

logger = logging.getLogger("megatron_operator")


class LeaseNotHeld(AdapterError):
    """This operator does not hold the Lease. No request was sent."""


class LeaderElection:
    """Leader election among operators. ``run`` takes part until cancelled; ``release_lease`` then frees the Lease.

    ``run`` calls ``start_leading`` when this operator acquires the Lease, and ``stop_leading`` when it loses the Lease.
    ``stop_leading`` must end all actions.
    """

    def __init__(
        self,
        api: ApiServer,
        lease: LeaseName,
        timings: LeaseTimings,
        start_leading: Callable[[], None],
        stop_leading: Callable[[], Awaitable[None]],
    ) -> None:
        self._api = api
        self._lease = lease
        # The host name identifies the pod for users; the suffix distinguishes the containers of that pod.
        self._view = LeaseView(f"{os.uname().nodename}_{uuid.uuid4().hex[:8]}", timings)
        self._start_leading = start_leading
        self._stop_leading = stop_leading
        self._found: Json | None = None
        self._told = ""

    def check(self) -> None:
        """Raises LeaseNotHeld unless this operator holds the Lease, even after the process was paused."""
        if not self._view.is_held(time.monotonic()):
            raise LeaseNotHeld(f"Lease {self._lease} is not held by this operator: no request is sent")

    async def run(self) -> None:
        """Never returns."""
        timings = self._view.timings
        while True:
            while not await self._turn(timings.deadline):
                wait = self._view.seconds_until_free(time.monotonic()) or timings.retry_period
                await asyncio.sleep(min(wait, timings.retry_period))
            logger.info("this operator acts: it holds Lease %s as %s", self._lease, self._view.identity)
            self._start_leading()
            await self._keep()
            logger.warning("this operator stands by: it lost Lease %s", self._lease)
            await self._stop_leading()

    async def release_lease(self) -> None:
        """Release the Lease, if held. Call it after all actions have ended; errors only delay the successor."""
        if not self._held:
            return
        self._view.forget()
        lease = self._lease
        try:
            async with asyncio.timeout(self._view.timings.deadline):
                # Read it again: a renewal may have been interrupted after the server had stored it.
                found = await self._api.get("Lease", lease.namespace, lease.name)
                if found is not None and self._view.owns(found["spec"]):
                    await self._api.replace({**found, "spec": self._view.release(found["spec"], datetime.now(UTC))})
        except (AdapterError, TimeoutError) as error:
            logger.warning("Lease %s is not released, but expires: %s", lease, str(error) or "no answer in time")

    async def _keep(self) -> None:
        """Returns when the Lease is lost."""
        timings = self._view.timings
        delay = timings.renew_interval
        while (left := self._view.seconds_left(time.monotonic())) > 0:
            await asyncio.sleep(min(delay, left))
            left = self._view.seconds_left(time.monotonic())
            delay = timings.renew_interval if left > 0 and await self._turn(left) else timings.retry_period

    async def _turn(self, seconds: float) -> bool:
        """One attempt to acquire or renew the Lease within ``seconds``; returns whether it is held. Never raises."""
        try:
            async with asyncio.timeout(seconds):
                await self._write() if self._found is not None and self._held else await self._look()
            self._tell("")
        except TimeoutError:
            self._found = None
            self._tell(f"no answer about Lease {self._lease} within {seconds:.1f} s")
        except AdapterError as error:
            self._found = None
            self._tell(str(error))
        except Exception:
            self._found = None
            logger.exception("Lease %s: an attempt failed unexpectedly", self._lease)
        else:
            return self._held
        return False

    @property
    def _held(self) -> bool:
        return self._view.is_held(time.monotonic())

    async def _look(self) -> None:
        """Read the Lease, and acquire it if it is free."""
        lease = self._lease
        self._found = await self._api.get("Lease", lease.namespace, lease.name)
        now = time.monotonic()
        self._view.observe({} if self._found is None else self._found.get("spec") or {}, now)
        if self._view.seconds_until_free(now) == 0:
            await self._write()

    async def _write(self) -> None:
        began, spec = time.monotonic(), self._view.desired_spec(datetime.now(UTC))
        if self._found is None:
            self._found = await self._api.create(self._manifest(spec))
        else:
            # The resource version makes one of two concurrent writes fail.
            self._found = await self._api.replace({**self._found, "spec": spec})
        self._view.record_written(self._found["spec"], began)

    def _manifest(self, spec: dict[str, Any]) -> Json:
        metadata = {"name": self._lease.name, "namespace": self._lease.namespace}
        return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}

    def _tell(self, trouble: str) -> None:
        """Log a problem when it begins, not with every attempt."""
        if trouble and trouble != self._told:
            logger.warning("%s", trouble)
        self._told = trouble
