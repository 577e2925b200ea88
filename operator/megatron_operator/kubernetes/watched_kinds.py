"""The kinds that kopf watches, so that one is watched from when the first object of it is made.

kopf looks for kinds when a definition changes. The API server tells of a new kind a moment later, maybe after the last
change, and kopf does not look again; with rights in single namespaces it looks only when it starts.
"""

from __future__ import annotations

import kopf
from kopf._cogs.structs.references import Insights

from megatron_operator.kubernetes.api_server import group_version_plural


class WatchedKinds:
    """Of one run of kopf, which takes ``insights`` as it starts."""

    def __init__(self) -> None:
        self.insights = Insights()

    async def add(self, kind: str) -> None:
        """Watch objects of this kind, which the API server serves, if they are not watched yet."""
        resource = kopf.Resource(*group_version_plural(kind), kind=kind, namespaced=True)
        if resource in self.insights.watched_resources:
            return
        async with self.insights.revised:
            self.insights.watched_resources.add(resource)
            self.insights.revised.notify_all()
