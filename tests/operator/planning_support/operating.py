"""Whole rounds over a simulated cluster with injected failures."""

from __future__ import annotations

from typing import Any

from planning_support.resources import resource_object
from planning_support.simulation import SimulatedCluster

from megatron_operator.api.v1alpha1 import Cache
from megatron_operator.events import Event
from megatron_operator.observed_state import Action, AdapterError, ApplyChild, ObservedState
from megatron_operator.reconcile import ReconcileResult, reconcile
from megatron_operator.status import as_json


class Flaky(SimulatedCluster):
    """Rejects some kinds of actions; observations can be made to fail."""

    def __init__(self) -> None:
        super().__init__()
        self.refuses: dict[type, AdapterError] = {}
        self.refuses_kinds: dict[str, AdapterError] = {}
        """The same, for some kinds of children."""
        self.blind = False
        self.asked: list[Action] = []
        """All actions, including rejected ones."""

    async def observe(self, name: str, namespace: str, cache: Cache | None = None) -> ObservedState:
        if self.blind:
            raise AdapterError("the API server does not answer")
        return await super().observe(name, namespace, cache)

    async def apply(self, name: str, namespace: str, action: Action) -> None:
        self.asked.append(action)
        if type(action) in self.refuses:
            raise self.refuses[type(action)]
        if isinstance(action, ApplyChild) and action.manifest["kind"] in self.refuses_kinds:
            raise self.refuses_kinds[action.manifest["kind"]]
        await super().apply(name, namespace, action)


class Operating:
    """Rounds over one resource, whose status is written as by the adapters."""

    def __init__(self, **spec: Any) -> None:
        self.cluster = Flaky()
        self.obj = resource_object(**spec)
        self.told: list[Event] = []
        self.failures = 0
        """Consecutive failed rounds."""

    async def round(self) -> ReconcileResult:
        result = await reconcile(self.obj, self.cluster, failures=self.failures)
        self.failures = self.failures + 1 if result.failed else 0
        merged = {**self.obj.get("status", {}), **result.patch}
        self.obj["status"] = {field: value for field, value in merged.items() if value is not None}
        assert self.obj["status"] == as_json(result.status)
        self.told += result.events
        return result

    async def settle(self) -> ReconcileResult:
        for _ in range(8):
            await self.round()
            self.cluster.start_all()
            self.cluster.advance_engine()
        return await self.round()

    def edit(self, **fields: Any) -> None:
        self.obj["spec"] = {**self.obj["spec"], **fields}
        self.obj["metadata"]["generation"] += 1

    def reasons(self) -> list[str]:
        """The events so far, which are then dropped."""
        reasons, self.told = [event.reason for event in self.told], []
        return reasons
