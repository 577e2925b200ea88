"""A resource and its plans, round by round."""

from __future__ import annotations

from typing import Any

from planning_support.resources import parsed
from planning_support.simulation import SimulatedCluster

from megatron_operator.api.v1alpha1 import MegatronInference, MegatronInferenceStatus
from megatron_operator.observed_state import Action, CreatePod, DeletePod, SendSignal
from megatron_operator.plan import Plan, plan
from megatron_operator.settings import Settings
from megatron_operator.status import build_status


class Planning:
    """A resource, its cluster, and rounds of planning over both."""

    def __init__(self, **spec: Any) -> None:
        self.cluster = SimulatedCluster()
        self.status = MegatronInferenceStatus()
        self.spec = spec
        self.settings = Settings(has_spare_nodes=False)

    @property
    def resource(self) -> MegatronInference:
        """The resource with its last status."""
        return parsed(self.status, **self.spec)

    def look(self) -> Plan:
        """Computes a plan without applying it."""
        return plan(self.resource, self.cluster.observed(), self.settings)

    def round(self) -> list[Action]:
        """Plans, applies, and writes the status."""
        resource, observed = self.resource, self.cluster.observed()
        actions = list(plan(resource, observed, self.settings).actions)
        self.status = build_status(resource, observed, self.settings)
        for action in actions:
            self.cluster.carry_out(action)
        return actions

    def settled(self) -> Planning:
        """Runs until all pods are ready and no action is left."""
        for _ in range(8):
            self.round()
            self.cluster.start_all()
            self.cluster.advance_engine()
        assert self.round() == []
        return self


def created(actions: list[Action]) -> list[str]:
    """Names of the created pods."""
    return [action.manifest["metadata"]["name"] for action in actions if isinstance(action, CreatePod)]


def deleted(actions: list[Action]) -> list[str]:
    """Names of the deleted pods."""
    return [action.name for action in actions if isinstance(action, DeletePod)]


def sent(actions: list[Action]) -> list[str]:
    """The sent signals."""
    return [action.signal for action in actions if isinstance(action, SendSignal)]


def restarts(actions: list[Action]) -> list[str]:
    """The restart counts in the annotations of the created pods."""
    annotations = [action.manifest["metadata"]["annotations"] for action in actions if isinstance(action, CreatePod)]
    return [each["inference.megatron.dev/restarts"] for each in annotations]
