"""Nodes that several resources share, each with room for one pod."""

from __future__ import annotations

from dataclasses import replace

from planning_support.planning import Planning
from planning_support.simulation import SimulatedCluster

from megatron_operator.observed_state import ObservedState


class Nodes:
    """``count`` nodes; pods of all ``clusters`` hold them from their scheduling until they are gone."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.clusters: list[SimulatedCluster] = []

    @property
    def free(self) -> int:
        pods = [pod for cluster in self.clusters for pod in cluster.pods.values()]
        return self.count - sum(pod.startup_since is not None and not pod.finished for pod in pods)


class ClusterOnNodes(SimulatedCluster):
    """The pods of one resource on shared nodes."""

    def __init__(self, nodes: Nodes, gang_kinds: frozenset[str] = frozenset()) -> None:
        self.nodes = nodes
        self.gang_kinds = gang_kinds
        super().__init__()
        nodes.clusters.append(self)

    @property
    def has_room(self) -> bool:
        return self.nodes.free > 0

    @has_room.setter
    def has_room(self, _: bool) -> None:
        """The nodes decide."""

    def observed(self) -> ObservedState:
        return replace(super().observed(), gang_kinds=self.gang_kinds)


def planning_on(nodes: Nodes, *gang_kinds: str, **spec: object) -> Planning:
    """A resource on these nodes, in a cluster that serves these kinds."""
    planning = Planning(**spec)
    planning.cluster = ClusterOnNodes(nodes, frozenset(gang_kinds))
    return planning
