"""Which of some kinds an API server serves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection

from megatron_operator.kubernetes.api_server import ApiServer

REFRESH = 600.0
"""Seconds after which the API server is queried again: it may have been upgraded."""


class ServedKinds:
    """Those of ``kinds`` that one cluster serves. All resources share one answer."""

    def __init__(self, api: ApiServer, kinds: Collection[str]) -> None:
        self._api = api
        self._kinds = kinds
        self._lock = asyncio.Lock()
        self._served: frozenset[str] = frozenset()
        self._expires = 0.0

    async def get(self) -> frozenset[str]:
        """The kinds that the API server serves. Raises AdapterError."""
        async with self._lock:
            if time.monotonic() >= self._expires:
                known = await asyncio.gather(*map(self._api.knows, self._kinds))
                self._served = frozenset(kind for kind, found in zip(self._kinds, known, strict=True) if found)
                self._expires = time.monotonic() + REFRESH
            return self._served
