"""Which kinds of gang scheduling a cluster has, and the objects of these kinds that a resource has."""

from __future__ import annotations

import asyncio
import http
from collections.abc import Collection, Mapping
from typing import Any

from megatron_operator import names
from megatron_operator.kubernetes.api_server import ApiServer, ServerError
from megatron_operator.kubernetes.served_kinds import ServedKinds

Object = Mapping[str, Any]


class GangKinds:
    """The kinds of ``names.GANG_KINDS`` that one cluster serves. All resources share one answer."""

    def __init__(self, api: ApiServer) -> None:
        self._api = api
        self._served = ServedKinds(api, names.GANG_KINDS)

    async def served(self) -> frozenset[str]:
        """The kinds that the API server serves. Raises AdapterError."""
        return await self._served.get()

    async def objects(self, name: str, namespace: str, kinds: Collection[str]) -> list[Object]:
        """The objects of these kinds with the labels of the resource. Raises AdapterError."""
        labels = names.selector_labels(name)
        listed = await asyncio.gather(*(self._listed(kind, namespace, labels) for kind in sorted(kinds)))
        return [each for objects in listed for each in objects]

    async def _listed(self, kind: str, namespace: str, labels: Mapping[str, str]) -> list[Object]:
        try:
            # Items of a list have no kind.
            return [{**each, **names.gang_type(kind)} for each in await self._api.list(kind, namespace, labels)]
        except ServerError as error:
            if error.status == http.HTTPStatus.NOT_FOUND:
                return []  # The kind was uninstalled.
            raise
