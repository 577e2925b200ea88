"""The recommended next step for a resource. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_operator.api.v1alpha1 import ConditionType, MegatronInferenceStatus, Phase
from megatron_operator.commands.console import program
from megatron_operator.conditions import GROUP_FAILED, IDLE_STOPPED, is_auto_suspended
from megatron_operator.restarts import RESTART_BUDGET_EXCEEDED
from megatron_operator.status import INVALID_SPEC
from megatron_operator.status_inputs import ENGINE_UNREACHABLE

_BY_PHASE = {
    Phase.STOPPED: "{program} start {name}",
    Phase.PAUSED: "{program} unpause {name}   continues the requests that wait",
    Phase.SUSPENDED: "{program} resume {name}   to Paused; `start {name}` goes on to Running",
    Phase.RUNNING: '{program} chat {name} "What is the capital of France?"',
    Phase.TERMINATING: "nothing: it ends by itself",
}
_BY_REASON = {
    "Unschedulable": "add nodes that fit, or request less (spec.parallelism, spec.pods); "
    "`{program} doctor` shows the nodes' GPUs",
    "SchedulingGated": "free quota of the queue named above, or wait until it has some",
    "ImagePull": "correct spec.image, or add imagePullSecrets for the registry to the ServiceAccount",
    "BackOff": "{program} logs {name}   shows the logs of the attempt; the next one starts by itself",
    GROUP_FAILED: "{program} logs {name}   shows the logs; the next attempt starts by itself",
    IDLE_STOPPED: "send a request through the activator, which starts the pods; "
    "spec.autoSuspend.stopAfter 0s starts them too, and keeps them",
    INVALID_SPEC: "kubectl edit mi {name}   and fix the fields named above",
    ENGINE_UNREACHABLE: "{program} logs {name}   and check whether a NetworkPolicy blocks the operator from port 9000",
    "ApplyFailed": "fix what the API server rejects, as shown above; the operator retries",
    RESTART_BUDGET_EXCEEDED: "{program} logs {name}   then fix the cause, and change spec.restart.id to try again",
}
_GAVE_UP = "fix the spec as shown above (kubectl edit mi {name}); the operator tries again when the spec changes"
_WAIT = "kubectl get mi {name} --watch   shows each step"


def next_step(obj: Mapping[str, Any], status: MegatronInferenceStatus, *, seen: bool) -> str:
    """The next step in one line. ``seen``: whether the operator has reported on the current spec."""
    metadata = obj["metadata"]
    if not obj.get("status") or not seen:
        step = "{program} doctor   shows whether an operator watches this namespace"
    elif metadata.get("deletionTimestamp"):
        step = _BY_PHASE[Phase.TERMINATING]
    else:
        step = _of(status)
    return step.format(program=program(), name=f"{metadata['name']} -n {metadata['namespace']}")


def _of(status: MegatronInferenceStatus) -> str:
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
