"""Kinds that not every cluster has, or not yet.

Once one was missed, a single look now and then serves all who wait for it; and one that is there is watched.
"""

from __future__ import annotations

import asyncio
import http
from collections.abc import Awaitable, Callable

from megatron_operator.kubernetes.api_server import ApiServer, ServerError, group_version_plural
from megatron_operator.world import ActionRefused, KindMissing, WorldError

FIRST_PAUSE = 5.0
LONGEST_PAUSE = 60.0
"""Seconds between looks for kinds that somebody waits for, which grow from the one to the other."""

FIXES = {
    "HTTPRoute": "install the Gateway API, version 1.2 or newer, with a gateway that implements it, or remove"
    " spec.expose.httpRoute",
    "Ingress": "upgrade Kubernetes to 1.19 or newer, or remove spec.expose.ingress",
}

UNDECLARED = "field not declared in schema"
"""The API server's words, with status 500, about a field that a definition does not have yet."""

Wake = Callable[[], None]
Watch = Callable[[str], Awaitable[None]]


class MissingKinds:
    """Of one cluster. ``close`` ends the looking."""

    def __init__(self, api: ApiServer, watch: Watch) -> None:
        """``watch`` is called with each kind that there is an object of; it may be watched already."""
        self._api = api
        self._watch = watch
        self._waiting: dict[str, set[Wake]] = {}
        self._task: asyncio.Task[None] | None = None

    def is_missing(self, kind: str) -> bool:
        """As far as is known; this asks nobody."""
        return kind in self._waiting

    def check(self, kind: str, wake: Wake) -> None:
        """Raises KindMissing for a kind that was missed already; ``wake`` is called when the cluster has got it."""
        if kind in self._waiting:
            self._waiting[kind].add(wake)
            group, version, _ = group_version_plural(kind)
            raise KindMissing(f"{kind}: this cluster has no such kind in {group}/{version}; {FIXES[kind]}")

    async def explain(self, kind: str, error: ServerError, wake: Wake) -> None:
        """Raises KindMissing where the error tells that there is no such kind, ActionRefused where it is too old."""
        if kind not in FIXES:
            return
        if UNDECLARED in str(error):
            raise ActionRefused(f"{error}; {FIXES[kind]}") from error
        if error.status == http.HTTPStatus.NOT_FOUND and not await self._api.knows(kind):
            self._waiting.setdefault(kind, set())
            if self._task is None or self._task.done():
                self._task = asyncio.create_task(self._look(), name="looking for missing kinds")
            self.check(kind, wake)

    async def found(self, kind: str) -> None:
        """There is an object of the kind, whose changes are of interest from now on."""
        if kind in FIXES:
            await self._watch(kind)

    def forget(self, wake: Wake) -> None:
        """Who is called by ``wake`` waits no more."""
        for waiting in self._waiting.values():
            waiting.discard(wake)

    async def close(self) -> None:
        """End the looking."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _look(self) -> None:
        """Until nobody waits any more."""
        pause = FIRST_PAUSE
        while self._waiting:
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
            for kind in list(self._waiting):
                if not self._waiting[kind] or await self._has(kind):
                    for wake in self._waiting.pop(kind):
                        wake()

    async def _has(self, kind: str) -> bool:
        try:
            return await self._api.knows(kind)
        except WorldError:
            return False
