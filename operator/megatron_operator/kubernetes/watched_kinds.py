"""The kinds that kopf watches, so that one is watched from when the first object of it is made.

kopf looks for kinds when a definition changes. The API server tells of a new kind a moment later, maybe after the last
change, and kopf does not look again; with rights in single namespaces it looks only when it starts.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import kopf
from kopf._cogs.structs.references import Insights

from megatron_operator.kubernetes.api_server import group_version_plural
from megatron_operator.world import WorldError

LOOK_AGAIN = 5.0
"""Seconds between two looks at whether a kind is watched. Only for one that is not, the API server is asked."""


class WatchedKinds:
    """Of one run of kopf, which takes ``insights`` as it starts."""

    def __init__(self) -> None:
        self.insights = Insights()

    async def add(self, kind: str) -> None:
        """Watch objects of this kind, which the API server serves, if they are not watched yet."""
        resource = _resource(kind)
        if resource in self.insights.watched_resources:
            return
        async with self.insights.revised:
            self.insights.watched_resources.add(resource)
            self.insights.revised.notify_all()

    async def keep(self, kind: str, is_served: Callable[[str], Awaitable[bool]]) -> None:
        """Watch objects of this kind whenever the API server serves it, until cancelled.

        The discovery of a server that has just started may lack the kind at the only moment at which kopf looks. The
        operator would run on, and see no resource.
        """
        while True:
            await asyncio.sleep(LOOK_AGAIN)
            if _resource(kind) not in self.insights.watched_resources:
                with contextlib.suppress(WorldError):
                    if await is_served(kind):
                        await self.add(kind)


def _resource(kind: str) -> kopf.Resource:
    return kopf.Resource(*group_version_plural(kind), kind=kind, namespaced=True)
