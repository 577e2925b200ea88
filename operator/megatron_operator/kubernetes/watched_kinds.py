"""The kinds that kopf watches. A kind is watched from the creation of its first object on.

kopf discovers kinds when a CRD changes. The API server may serve a new kind a moment later, and kopf does not look
again. With Roles in single namespaces kopf discovers kinds only at its start.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import kopf
from kopf._cogs.structs.references import Insights

from megatron_operator.kubernetes.api_server import group_version_plural
from megatron_operator.observed_state import AdapterError

LOOK_AGAIN = 5.0
"""Seconds between checks whether a kind is watched. The API server is queried only for a kind that is not."""


class WatchedKinds:
    """The kinds of one run of kopf, which receives ``insights`` at its start."""

    def __init__(self) -> None:
        self.insights = Insights()

    async def add(self, kind: str) -> None:
        """Watch objects of this kind, unless they are watched already."""
        resource = _resource(kind)
        if resource in self.insights.watched_resources:
            return
        async with self.insights.revised:
            self.insights.watched_resources.add(resource)
            self.insights.revised.notify_all()

    async def keep(self, kind: str, is_served: Callable[[str], Awaitable[bool]]) -> None:
        """Watch objects of this kind whenever the API server serves it, until cancelled.

        A server that has just started may lack the kind at the only time at which kopf discovers kinds. The operator
        would then run without seeing any resource.
        """
        while True:
            await asyncio.sleep(LOOK_AGAIN)
            if _resource(kind) not in self.insights.watched_resources:
                with contextlib.suppress(AdapterError):
                    if await is_served(kind):
                        await self.add(kind)


def _resource(kind: str) -> kopf.Resource:
    return kopf.Resource(*group_version_plural(kind), kind=kind, namespaced=True)
