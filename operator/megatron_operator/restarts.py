"""Restart policy: what follows a failed attempt."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_operator.api.v1alpha1 import FailurePolicy
from megatron_operator.replica_groups import GANG_PAUSE, GANG_TIMEOUT, ReplicaGroup, ReplicaGroupFailure

RESTART_BUDGET_EXCEEDED = "RestartBudgetExceeded"
BAD_INPUT = "InvalidSpec"


@dataclass(frozen=True)
class Retry:
    """The next attempt starts at ``at`` (seconds since the epoch) and counts ``restarts`` against the budget."""

    at: float
    restarts: int
    is_counted: bool = True
    """Whether the restart counts against the budget."""


@dataclass(frozen=True)
class GiveUp:
    """No further attempt until the spec changes. ``reason`` is the reason of the condition."""

    reason: str


def restart_decision(
    group: ReplicaGroup, failed: ReplicaGroupFailure, policy: FailurePolicy, template_hash: str
) -> Retry | GiveUp:
    """Decide whether and when to restart. A changed template restarts at once; a pod that the cluster ended does not
    count; invalid input never restarts; otherwise the budget and an exponential back-off apply."""
    if group.template_hash != template_hash:
        return Retry(at=failed.time, restarts=0)
    if failed.failure.reason == GANG_TIMEOUT:
        return Retry(at=failed.time + GANG_PAUSE, restarts=failed.restarts, is_counted=False)
    if failed.failure.disruption:
        return Retry(at=failed.time + backoff(0, policy), restarts=failed.restarts, is_counted=False)
    if failed.failure.bad_input:
        return GiveUp(failed.failure.reason or BAD_INPUT)
    if failed.restarts >= policy.max_restarts:
        return GiveUp(RESTART_BUDGET_EXCEEDED)
    return Retry(at=failed.time + backoff(failed.restarts, policy), restarts=failed.restarts + 1)


def backoff(restarts: int, policy: FailurePolicy) -> float:
    """Seconds before restart number ``restarts + 1``: doubles each time, up to the maximum."""
    return min(policy.backoff * 2.0 ** min(restarts, 60), policy.max_backoff)
