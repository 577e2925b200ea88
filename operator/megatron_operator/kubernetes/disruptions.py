"""What a cluster tells about disruptions: cordoned nodes, and the PodDisruptionBudgets of resources."""

from __future__ import annotations

import asyncio
import http
import time
from collections.abc import Mapping
from typing import Any

from megatron_operator import names
from megatron_operator.kubernetes.api_server import ApiServer, ServerRefusal
from megatron_operator.kubernetes.served_kinds import ServedKinds

REFRESH_NODES = 60.0
"""Seconds after which cordoned nodes are listed again, in case the watch missed the end of a cordon."""
REFRESH_ROLE = 600.0
"""The same while the operator's role does not permit it: the role may have changed."""

Object = Mapping[str, Any]


class Disruptions:
    """Cordoned nodes and the kind of budgets of one cluster. All resources share the answers."""

    def __init__(self, api: ApiServer, *, has_budgets: bool = True) -> None:
        """Without budgets the operator needs no right for them."""
        self._api = api
        self._has_budgets = has_budgets
        self._lock = asyncio.Lock()
        self._cordoned: set[str] | None = None
        self._nodes_expire = 0.0
        self._budget_kinds = ServedKinds(api, names.BUDGET_KINDS)

    async def may_read_nodes(self) -> bool:
        """Whether the operator's role permits to list nodes. Raises AdapterError."""
        return await self.cordoned_nodes() is not None

    async def cordoned_nodes(self) -> frozenset[str] | None:
        """Names of the cordoned nodes; None when the operator may not list nodes. Raises AdapterError."""
        async with self._lock:
            if time.monotonic() >= self._nodes_expire:
                try:
                    self._cordoned = {node["metadata"]["name"] for node in await self._api.cordoned_nodes()}
                except ServerRefusal as refusal:
                    if refusal.status != http.HTTPStatus.FORBIDDEN:
                        raise
                    self._cordoned = None
                self._nodes_expire = time.monotonic() + (REFRESH_ROLE if self._cordoned is None else REFRESH_NODES)
            return None if self._cordoned is None else frozenset(self._cordoned)

    def node_changed(self, node: str, *, is_cordoned: bool) -> bool:
        """Record an event of the node. Returns whether its cordon began or ended."""
        if self._cordoned is None or is_cordoned == (node in self._cordoned):
            return False
        (self._cordoned.add if is_cordoned else self._cordoned.discard)(node)
        return True

    async def budget_kind(self) -> str | None:
        """The first of ``names.BUDGET_KINDS`` that the API server serves; None without budgets. Raises AdapterError."""
        if not self._has_budgets:
            return None
        served = await self._budget_kinds.get()
        return next((kind for kind in names.BUDGET_KINDS if kind in served), None)

    async def budget(self, name: str, namespace: str) -> Object | None:
        """The PodDisruptionBudget with the name of the resource. Raises AdapterError."""
        kind = await self.budget_kind()
        return None if kind is None else await self._api.get(kind, namespace, names.disruption_budget(name))
