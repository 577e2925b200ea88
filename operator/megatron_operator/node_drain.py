"""Drains of nodes: which replica groups leave a cordoned node, and whether another node has room for a successor.

A pure function of the observed state, as the plan is. A cordon is taken as the announcement of a drain: afterwards the
scheduler places no pod on the node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_operator.api.v1alpha1 import CordonedNodesPolicy, MegatronInference
from megatron_operator.observed_state import ObservedState
from megatron_operator.replica_groups import ReplicaGroup

UNSCHEDULABLE_TAINT = "node.kubernetes.io/unschedulable"
"""Taint of a cordoned node, with effect NoSchedule."""


@dataclass(frozen=True)
class NodeDrain:
    """The cordoned nodes as they concern one resource."""

    resource: MegatronInference
    observed: ObservedState

    @property
    def is_honored(self) -> bool:
        """Whether groups leave cordoned nodes. Pods that may be placed on one again would be replaced for ever."""
        policy = self.resource.spec.disruption.cordoned_nodes_policy
        is_known = self.observed.cordoned_nodes is not None
        return is_known and policy is CordonedNodesPolicy.HONOR and not self._ignores_cordons()

    def nodes(self, group: ReplicaGroup) -> tuple[str, ...]:
        """The cordoned nodes that the group has to leave, by name."""
        cordoned = (self.observed.cordoned_nodes if self.is_honored else None) or frozenset()
        return tuple(sorted({pod.node for pod in group.live_pods if pod.node is not None and pod.node in cordoned}))

    def scheduling_deadline(self, groups: Sequence[ReplicaGroup]) -> float | None:
        """When a group that waits for nodes shows that there is no room for it; None while no group waits."""
        waiting = [pod.created_at for group in groups for pod in group.live_pods if pod.startup_since is None]
        return min(waiting) + self.resource.spec.disruption.scheduling_timeout if waiting else None

    def has_no_room(self, groups: Sequence[ReplicaGroup]) -> bool:
        """Whether a group has waited too long for nodes. All groups need nodes of the same kind."""
        deadline = self.scheduling_deadline(groups)
        return deadline is not None and deadline <= self.observed.now

    def _ignores_cordons(self) -> bool:
        override = self.resource.spec.pod_template.spec
        tolerations = [each.model_dump(mode="json") for each in self.resource.spec.scheduling.tolerations]
        tolerations += [each for each in override.get("tolerations") or [] if isinstance(each, dict)]
        return bool(override.get("nodeName")) or any(
            each.get("key") in (None, "", UNSCHEDULABLE_TAINT) and each.get("effect") in (None, "", "NoSchedule")
            for each in tolerations
        )
