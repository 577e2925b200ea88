"""One of several operators acts: the one that holds the Lease."""

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
from megatron_operator.world import WorldError

logger = logging.getLogger("megatron_operator")


class LeaseNotHeld(WorldError):
    """Another operator may be acting: nothing was sent."""


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
        # A host name tells people which pod it is; the rest tells it from an earlier container of that pod.
        self._view = LeaseView(f"{os.uname().nodename}_{uuid.uuid4().hex[:8]}", timings)
        self._start_leading = start_leading
        self._stop_leading = stop_leading
        self._found: Json | None = None
        self._told = ""

    def check(self) -> None:
        """Raises NotLeading unless we hold the Lease; also right after the process was halted for a while."""
        if not self._view.is_held(time.monotonic()):
            raise LeaseNotHeld(f"Lease {self._lease} is not held by this operator: nothing is done")

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
            logger.warning("this operator stands by: it holds Lease %s no more", self._lease)
            await self._stop_leading()

    async def release_lease(self) -> None:
        """Lets go of the Lease, if it is held. Call it after everything has ended; errors only delay the successor."""
        if not self._held:
            return
        self._view.forget()
        lease = self._lease
        try:
            async with asyncio.timeout(self._view.timings.deadline):
                # Read anew: a renewal may have been cut off after it was carried out.
                found = await self._api.get("Lease", lease.namespace, lease.name)
                if found is not None and self._view.owns(found["spec"]):
                    await self._api.replace({**found, "spec": self._view.release(found["spec"], datetime.now(UTC))})
        except (WorldError, TimeoutError) as error:
            logger.warning("Lease %s is not released, but runs out: %s", lease, str(error) or "no answer in time")

    async def _keep(self) -> None:
        """Returns when the Lease is lost."""
        timings = self._view.timings
        delay = timings.renew_interval
        while (left := self._view.seconds_left(time.monotonic())) > 0:
            await asyncio.sleep(min(delay, left))
            left = self._view.seconds_left(time.monotonic())
            delay = timings.renew_interval if left > 0 and await self._turn(left) else timings.retry_period

    async def _turn(self, seconds: float) -> bool:
        """One attempt to take or to keep the Lease, of so many seconds at most; whether it went well. Never raises."""
        try:
            async with asyncio.timeout(seconds):
                await self._write() if self._found is not None and self._held else await self._look()
            self._tell("")
        except TimeoutError:
            self._found = None
            self._tell(f"no answer about Lease {self._lease} within {seconds:.1f} s")
        except WorldError as error:
            self._found = None
            self._tell(str(error))
        except Exception:
            self._found = None
            logger.exception("Lease %s: an attempt ended unexpectedly", self._lease)
        else:
            return self._held
        return False

    @property
    def _held(self) -> bool:
        return self._view.is_held(time.monotonic())

    async def _look(self) -> None:
        """Reads the Lease, and takes it if it is nobody's."""
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
            # With the version that was read: of two that write, one loses.
            self._found = await self._api.replace({**self._found, "spec": spec})
        self._view.record_written(self._found["spec"], began)

    def _manifest(self, spec: dict[str, Any]) -> Json:
        metadata = {"name": self._lease.name, "namespace": self._lease.namespace}
        return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}

    def _tell(self, trouble: str) -> None:
        """Log what is wrong when it comes up, not with every attempt."""
        if trouble and trouble != self._told:
            logger.warning("%s", trouble)
        self._told = trouble
