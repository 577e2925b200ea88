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
from megatron_operator.kubernetes.lease import Claim, LeaseName, Terms
from megatron_operator.world import WorldError

logger = logging.getLogger("megatron_operator")


class NotLeading(WorldError):
    """Another operator may be acting: nothing was sent."""


class Election:
    """``run`` takes part until it is cancelled; ``withdraw`` then lets the next one in at once.

    ``lead`` is called when we have become the one that acts, ``stand_by`` when we are so no more; it must end all acts.
    """

    def __init__(
        self,
        api: ApiServer,
        lease: LeaseName,
        terms: Terms,
        lead: Callable[[], None],
        stand_by: Callable[[], Awaitable[None]],
    ) -> None:
        self._api = api
        self._lease = lease
        # A host name tells people which pod it is; the rest tells it from an earlier container of that pod.
        self._claim = Claim(f"{os.uname().nodename}_{uuid.uuid4().hex[:8]}", terms)
        self._lead = lead
        self._stand_by = stand_by
        self._found: Json | None = None
        self._told = ""

    def check(self) -> None:
        """Raises NotLeading unless we hold the Lease; also right after the process was halted for a while."""
        if not self._claim.is_held(time.monotonic()):
            raise NotLeading(f"Lease {self._lease} is not held by this operator: nothing is done")

    async def run(self) -> None:
        """Never returns."""
        terms = self._claim.terms
        while True:
            while not await self._turn(terms.deadline):
                wait = self._claim.seconds_until_free(time.monotonic()) or terms.look_every
                await asyncio.sleep(min(wait, terms.look_every))
            logger.info("this operator acts: it holds Lease %s as %s", self._lease, self._claim.identity)
            self._lead()
            await self._keep()
            logger.warning("this operator stands by: it holds Lease %s no more", self._lease)
            await self._stand_by()

    async def withdraw(self) -> None:
        """Lets go of the Lease, if it is held. Call it after everything has ended; errors only delay the successor."""
        if not self._held:
            return
        self._claim.drop()
        lease = self._lease
        try:
            async with asyncio.timeout(self._claim.terms.deadline):
                # Read anew: a renewal may have been cut off after it was carried out.
                found = await self._api.get("Lease", lease.namespace, lease.name)
                if found is not None and self._claim.owns(found["spec"]):
                    await self._api.replace({**found, "spec": self._claim.release(found["spec"], datetime.now(UTC))})
        except (WorldError, TimeoutError) as error:
            logger.warning("Lease %s is not released, but runs out: %s", lease, str(error) or "no answer in time")

    async def _keep(self) -> None:
        """Returns when the Lease is lost."""
        terms = self._claim.terms
        delay = terms.renew_every
        while (left := self._claim.seconds_left(time.monotonic())) > 0:
            await asyncio.sleep(min(delay, left))
            left = self._claim.seconds_left(time.monotonic())
            delay = terms.renew_every if left > 0 and await self._turn(left) else terms.look_every

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
        return self._claim.is_held(time.monotonic())

    async def _look(self) -> None:
        """Reads the Lease, and takes it if it is nobody's."""
        lease = self._lease
        self._found = await self._api.get("Lease", lease.namespace, lease.name)
        now = time.monotonic()
        self._claim.see({} if self._found is None else self._found.get("spec") or {}, now)
        if self._claim.seconds_until_free(now) == 0:
            await self._write()

    async def _write(self) -> None:
        began, spec = time.monotonic(), self._claim.wish(datetime.now(UTC))
        if self._found is None:
            self._found = await self._api.create(self._manifest(spec))
        else:
            # With the version that was read: of two that write, one loses.
            self._found = await self._api.replace({**self._found, "spec": spec})
        self._claim.written(self._found["spec"], began)

    def _manifest(self, spec: dict[str, Any]) -> Json:
        metadata = {"name": self._lease.name, "namespace": self._lease.namespace}
        return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}

    def _tell(self, trouble: str) -> None:
        """Log what is wrong when it comes up, not with every attempt."""
        if trouble and trouble != self._told:
            logger.warning("%s", trouble)
        self._told = trouble
