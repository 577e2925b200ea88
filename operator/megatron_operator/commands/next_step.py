"""What a person would do next about a resource. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_operator.api.v1alpha1 import ConditionType, Phase, Status
from megatron_operator.commands.console import program
from megatron_operator.conditions import GROUP_FAILED, is_auto_suspended
from megatron_operator.restarts import RESTART_BUDGET_EXCEEDED
from megatron_operator.status import INVALID_SPEC
from megatron_operator.status_inputs import ENGINE_UNREACHABLE

_BY_PHASE = {
    Phase.STOPPED: "{program} start {name}",
    Phase.PAUSED: "{program} unpause {name}   answers what waits",
    Phase.SUSPENDED: "{program} resume {name}   to Paused; `start {name}` goes on to Running",
    Phase.RUNNING: '{program} chat {name} "What is the capital of France?"',
    Phase.TERMINATING: "nothing: it ends by itself",
}
_BY_REASON = {
    "Unschedulable": "give the cluster nodes that fit, or ask for less (spec.parallelism, spec.pods); "
    "`{program} doctor` shows the nodes' GPUs",
    "ImagePull": "correct spec.image, or let the ServiceAccount's imagePullSecrets open the registry",
    "BackOff": "{program} logs {name}   shows what the attempt said; the next one starts by itself",
    GROUP_FAILED: "{program} logs {name}   shows what it said; the next attempt starts by itself",
    INVALID_SPEC: "kubectl edit mi {name}   and mend the fields named above",
    ENGINE_UNREACHABLE: "{program} logs {name}   and see whether a NetworkPolicy keeps the operator from port 9000",
    "ApplyFailed": "mend what the API server refuses, as told above; it is tried again by itself",
    RESTART_BUDGET_EXCEEDED: "{program} logs {name}   then mend the cause, and change spec.restart.id to try again",
}
_GAVE_UP = "mend the spec as told above (kubectl edit mi {name}); it is tried again when the spec changes"
_WAIT = "kubectl get mi {name} --watch   shows each step of it"


def next_step(obj: Mapping[str, Any], status: Status, *, seen: bool) -> str:
    """One line. ``seen`` says whether the operator has reported on the spec as it is now."""
    metadata = obj["metadata"]
    if not obj.get("status") or not seen:
        step = "{program} doctor   tells whether an operator runs that looks after this namespace"
    elif metadata.get("deletionTimestamp"):
        step = _BY_PHASE[Phase.TERMINATING]
    else:
        step = _of(status)
    return step.format(program=program(), name=f"{metadata['name']} -n {metadata['namespace']}")


def _of(status: Status) -> str:
    for kind in (ConditionType.FAILED, ConditionType.DEGRADED, ConditionType.READY):
        condition = status.condition(kind)
        if condition is None or (condition.status == "False") != (kind is ConditionType.READY):
            continue
        if condition.reason in _BY_REASON:
            return _BY_REASON[condition.reason]
        if kind is ConditionType.FAILED:
            return _GAVE_UP
    if is_auto_suspended(status):
        return _BY_PHASE[Phase.RUNNING]
    ready = status.condition(ConditionType.READY)
    if ready is not None and ready.status == "Unknown":
        return _BY_REASON.get(ready.reason, _WAIT)
    return _BY_PHASE.get(status.phase, _WAIT)
