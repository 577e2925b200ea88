"""A cluster in memory with nodes that tests cordon."""

from __future__ import annotations

from dataclasses import replace

from planning_support.simulation import SimulatedCluster

from megatron_operator import names
from megatron_operator.observed_state import Manifest, ObservedState


class ClusterWithCordons(SimulatedCluster):
    """Pods are scheduled on ``node``, while there is room. With ``cordoned`` None the operator may not read nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.node = "node-a"
        self.cordoned: set[str] | None = set()
        self.budget_kind = names.BUDGET

    def observed(self) -> ObservedState:
        cordoned = None if self.cordoned is None else frozenset(self.cordoned)
        return replace(super().observed(), budget_kind=self.budget_kind, cordoned_nodes=cordoned)

    def change(self, name: str, **changes: object) -> None:
        if changes.get("startup_since") is not None and self.pods[name].node is None:
            changes["node"] = self.node
        super().change(name, **changes)

    def _create(self, manifest: Manifest) -> None:
        super()._create(manifest)
        name = manifest["metadata"]["name"]
        self.change(name, startup_since=self.pods[name].startup_since)
