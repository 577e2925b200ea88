"""The conditions of a resource, one function for each type."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_operator import names
from megatron_operator.api.v1alpha1 import Condition, ConditionType, MegatronInferenceStatus
from megatron_operator.api.v1alpha1.status import ConditionStatus
from megatron_operator.lifecycle import SETTLED_STATE, TRANSITION_REASONS, next_signal
from megatron_operator.observed_state import EngineState, Signal
from megatron_operator.replica_groups import ReplicaGroupState
from megatron_operator.status_inputs import ENGINE_UNREACHABLE, ReplicaGroupView, StatusInputs
from megatron_operator.timestamps import timestamp
from megatron_operator.wait_reasons import CACHE_FAILED, cache_reason, wait_reason

HOLDS_REQUESTS = (EngineState.PAUSED, EngineState.SUSPENDING, EngineState.SUSPENDED, EngineState.RESUMING)
GROUP_FAILED = "GroupFailed"
AUTO_SUSPENDED = "AutoSuspended"
ROLLOUT_STALLED = "RolloutStalled"
IDLE_STOPPED = "IdleStopped"
NODE_CORDONED = "NodeCordoned"
NO_ROOM = "NoRoomForSuccessor"
IN_PROGRESS_REASONS = {
    Signal.PAUSE: "Pausing",
    Signal.UNPAUSE: "Unpausing",
    Signal.SUSPEND: "Suspending",
    Signal.RESUME: "Resuming",
}


@dataclass(frozen=True)
class ConditionState:
    """A condition without its times."""

    status: ConditionStatus
    reason: str
    message: str


AS_EXPECTED = ConditionState("False", "AsExpected", "")
"""The state of a negative condition, such as Degraded, while nothing is wrong."""


def compute_conditions(inputs: StatusInputs) -> dict[ConditionType, ConditionState]:
    """All conditions of the resource."""
    cached = {} if inputs.cache.spec is None else {ConditionType.CACHED: _cached(inputs)}
    return {
        ConditionType.READY: ready(inputs),
        ConditionType.AVAILABLE: available(inputs),
        ConditionType.PROGRESSING: progressing(inputs),
        ConditionType.PAUSED: paused(inputs),
        ConditionType.SUSPENDED: suspended(inputs),
        ConditionType.DEGRADED: degraded(inputs),
        ConditionType.FAILED: failed(inputs),
        **cached,
    }


def written(
    findings: dict[ConditionType, ConditionState], before: MegatronInferenceStatus, generation: int, now: float
) -> list[Condition]:
    """The API objects of the conditions. A condition whose status is unchanged keeps its transition time."""
    return [_written(kind, finding, before.condition(kind), generation, now) for kind, finding in findings.items()]


def is_auto_suspended(status: MegatronInferenceStatus) -> bool:
    """Whether the engine is suspended because it was idle."""
    return _has_ready_reason(status, AUTO_SUSPENDED)


def is_idle_stopped(status: MegatronInferenceStatus) -> bool:
    """Whether there are no pods because the model was idle."""
    return _has_ready_reason(status, IDLE_STOPPED)


def _has_ready_reason(status: MegatronInferenceStatus, reason: str) -> bool:
    condition = status.condition(ConditionType.READY)
    return condition is not None and condition.reason == reason


def ready(inputs: StatusInputs) -> ConditionState:
    """True while the resource answers requests."""
    if not inputs.should_have_pods:
        return _leaving(inputs)
    if inputs.taken_services:
        return _names_taken(inputs)
    if inputs.leading_group.given_up is not None:
        return _why("False", inputs.leading_group, inputs)
    if inputs.is_unreachable:
        return _unreachable(inputs)
    if not inputs.accepts_requests:
        return _not_up_yet(inputs)
    return _by_engine_state(inputs)


def available(inputs: StatusInputs) -> ConditionState:
    """True while the resource answers requests, with at least one replica group."""
    found = ready(inputs)
    if found.status == "True":
        reason = found.reason if found.reason == AUTO_SUSPENDED else "EngineRunning"
        return ConditionState("True", reason, f"requests are answered; {_ready_groups(inputs)}")
    return found


def progressing(inputs: StatusInputs) -> ConditionState:
    """True while the resource moves towards its desired state."""
    if not inputs.should_have_pods:
        found = _leaving(inputs)
        return ConditionState("True" if inputs.observed.pods else "False", found.reason, found.message)
    if inputs.has_no_keys:
        secret = names.keys_secret(inputs.resource.name)
        words = f"the Secret {secret} was removed: all pods drain and end, then new pods start with new keys"
        return ConditionState("True", "RotatingKeys", words)
    if inputs.leaving_nodes:
        return _leaving_nodes(inputs)
    if not inputs.cache.is_filled:
        return replace(_cached(inputs), status="True")
    moving = [view for view in inputs.all_groups if view.state is not ReplicaGroupState.READY and view.given_up is None]
    if moving:
        return _why("True", moving[0], inputs)
    if inputs.surplus_groups:
        groups = _listed(inputs.surplus_groups)
        return ConditionState("True", "ScalingDown", f"replica group {groups} drains and is removed")
    given_up = [view for view in inputs.groups if view.given_up is not None]
    rolling_out = _rolling_out(inputs) if inputs.outdated_groups and not given_up else None
    if rolling_out is not None and rolling_out.status == "True":
        return rolling_out
    if inputs.leading_group.given_up is None:
        found = _lifecycle_progress(inputs)
        if found.status != "False" or not given_up:
            return rolling_out if rolling_out is not None and found.status == "False" else found
    return _why("False", given_up[0], inputs)


def paused(inputs: StatusInputs) -> ConditionState:
    """True while the engine holds requests."""
    return _engine_condition(inputs, HOLDS_REQUESTS, "requests are held until the engine is unpaused")


def suspended(inputs: StatusInputs) -> ConditionState:
    """True while the memory of the KV cache is released."""
    return _engine_condition(inputs, (EngineState.SUSPENDED,), "the memory of the KV cache is released")


def degraded(inputs: StatusInputs) -> ConditionState:
    """True while a part of the resource fails; the operator repairs it, or the message says what to do."""
    if not inputs.should_have_pods:
        return AS_EXPECTED
    if inputs.problems:
        return ConditionState("True", "ApplyFailed", "; ".join(inputs.problems))
    if (cause := cache_reason(inputs) if inputs.cache.spec else None) is not None and cause.reason == CACHE_FAILED:
        return ConditionState("True", CACHE_FAILED, cause.message)
    if inputs.stalled_groups:
        return _stalled(inputs)
    if inputs.unrecovered_groups:
        causes = [wait_reason(view, inputs) for view in inputs.unrecovered_groups]
        given_up = [view.given_up.reason for view in inputs.unrecovered_groups if view.given_up is not None]
        return ConditionState("True", (given_up or [GROUP_FAILED])[0], "; ".join(cause.message for cause in causes))
    overdue = inputs.observed.now - inputs.state_since
    if inputs.engine_state in TRANSITION_REASONS and overdue > inputs.policy.transition_timeout:
        since = f"since {timestamp(inputs.state_since)}, longer than {inputs.policy.transition_timeout.text}"
        return ConditionState(
            "True", "TransitionTimeout", f"the engine is {inputs.engine_state} {since}{_waiting_for_groups(inputs)}"
        )
    return AS_EXPECTED


def failed(inputs: StatusInputs) -> ConditionState:
    """True when the resource serves nothing and the operator has given up."""
    if inputs.should_have_pods and inputs.leading_group.given_up is not None:
        return _why("True", inputs.leading_group, inputs)
    return AS_EXPECTED


def _cached(inputs: StatusInputs) -> ConditionState:
    """True when the model cache is filled."""
    cause = cache_reason(inputs)
    return ConditionState("True" if inputs.cache.is_filled else "False", cause.reason, cause.message)


def _names_taken(inputs: StatusInputs) -> ConditionState:
    services = ", ".join(inputs.taken_services)
    fix = "delete the other owner, or create this resource under another name"
    return ConditionState(
        "False", "NameTaken", f"Service {services} has another owner, so it does not lead to these pods; {fix}"
    )


def _rolling_out(inputs: StatusInputs) -> ConditionState:
    rollout, budget = inputs.resource.spec.rollout, inputs.rollout_budget
    words = f"replica group {_listed(inputs.outdated_groups)} still runs the previous template"
    if rollout.paused:
        return ConditionState("False", "RolloutPaused", f"{words}; set rollout.paused to false to go on")
    if max(inputs.outdated_groups) < rollout.partition:
        return ConditionState("False", "RolloutPartitioned", f"{words}; lower rollout.partition to go on")
    limits = f"{budget.max_unavailable} may be unavailable and {budget.max_surge} may run in addition at a time"
    return ConditionState("True", "RollingOut", f"{words}; {limits}")


def _leaving_nodes(inputs: StatusInputs) -> ConditionState:
    nodes = sorted({node for nodes in inputs.leaving_nodes.values() for node in nodes})
    words = f"replica group {_listed([*inputs.leaving_nodes])} runs on cordoned nodes ({', '.join(nodes)})"
    if inputs.has_no_room:
        timeout = inputs.resource.spec.disruption.scheduling_timeout.text
        end = "it drains and ends now, and its next attempt starts when a node has room"
        return ConditionState("True", NO_ROOM, f"{words}, and no other node had room within {timeout}: {end}")
    others = [view for view in inputs.all_groups if view.group.index not in inputs.leaving_nodes]
    starting = [view for view in others if view.state is not ReplicaGroupState.READY]
    cause = f"; {wait_reason(starting[0], inputs).message}" if starting else ""
    return ConditionState("True", NODE_CORDONED, f"{words}; a replica group on another node starts first{cause}")


def _stalled(inputs: StatusInputs) -> ConditionState:
    causes = "; ".join(wait_reason(view, inputs).message for view in inputs.stalled_groups)
    words = f"the rollout has stopped: replica group {_listed(inputs.outdated_groups)} keeps the previous template"
    fix = "to go back, apply the previous spec again; to go on, fix the spec"
    return ConditionState("True", ROLLOUT_STALLED, f"{words}; {causes}; {fix}")


def _leaving(inputs: StatusInputs) -> ConditionState:
    left = ", ".join(pod.name for pod in inputs.observed.pods)
    if inputs.resource.deleting:
        return ConditionState(
            "False", "Terminating", f"the resource is being deleted; waiting for {left or 'its last children'}"
        )
    is_idle = inputs.idle_stop.is_stopped
    cause = "the model was idle for autoSuspend.stopAfter" if is_idle else "lifecycle is Stopped"
    if left:
        return ConditionState("False", "Stopping", f"{cause}; waiting for {left} to finish and end")
    if is_idle:
        return ConditionState("False", IDLE_STOPPED, f"{cause}: there are no pods; the next request starts them")
    return ConditionState(
        "False", "Stopped", "lifecycle is Stopped: there are no pods; set it to Running to start again"
    )


def _unreachable(inputs: StatusInputs) -> ConditionState:
    assert inputs.leader is not None
    engine = inputs.observed.engine
    cause = engine.message if engine is not None else "its control API has not been polled yet"
    words = f"the leader {inputs.leader.name} runs but its control API does not answer"
    message = f"{words} ({cause}); no signal is sent until it does"
    return ConditionState("Unknown", ENGINE_UNREACHABLE, message)


def _not_up_yet(inputs: StatusInputs) -> ConditionState:
    if inputs.problems and not inputs.observed.pods:
        return ConditionState("False", "ApplyFailed", "; ".join(inputs.problems))
    view = inputs.leading_group
    if inputs.leader is None and inputs.ready_groups:
        words = "no pod is the leader; the first pod of a ready replica group is being promoted; requests wait"
        return ConditionState("False", "LeaderMoving", words)
    if view.state is ReplicaGroupState.READY and inputs.leader is not None:
        words = f"{inputs.leader.name} is up; waiting for its engine to register with the coordinator"
        return ConditionState("False", "Registering", words)
    return _why("False", view, inputs)


def _by_engine_state(inputs: StatusInputs) -> ConditionState:
    state = inputs.engine_state
    if inputs.is_auto_suspended and not inputs.unrecovered_groups:
        return ConditionState(
            "True", AUTO_SUSPENDED, "the engine was suspended because it was idle; the next request resumes it"
        )
    match state:
        case EngineState.RUNNING if inputs.unrecovered_groups:
            groups = f"{inputs.ready_groups} of {len(inputs.groups)} replica groups serve"
            return ConditionState("True", "Degraded", f"{groups}; see the condition Degraded")
        case EngineState.RUNNING:
            return ConditionState("True", "EngineRunning", "requests are answered")
        case EngineState.PAUSED:
            return ConditionState("False", "Paused", "the engine is paused: requests are accepted and wait")
        case EngineState.SUSPENDED:
            return ConditionState("False", "Suspended", "the engine is suspended: requests are accepted and wait")
        case EngineState.STOPPED | None:
            return ConditionState("False", "EngineStopped", "the engine has stopped; its pods are ending")
        case _:
            reason = TRANSITION_REASONS[state]
            return ConditionState("False", reason, f"the engine is {state}{_waiting_for_groups(inputs)}; requests wait")


def _lifecycle_progress(inputs: StatusInputs) -> ConditionState:
    state, desired = inputs.engine_state, inputs.desired
    if inputs.is_unreachable:
        return _unreachable(inputs)
    if inputs.is_auto_suspended:
        return ConditionState(
            "False", "Settled", f"{_ready_groups(inputs)} and the engine is suspended until the next request"
        )
    if state is SETTLED_STATE[desired]:
        return ConditionState("False", "Settled", f"{_ready_groups(inputs)} and the engine is {state}, as desired")
    if state in TRANSITION_REASONS:
        return ConditionState(
            "True",
            TRANSITION_REASONS[state],
            f"the engine is {state} on its way to {desired}{_waiting_for_groups(inputs)}",
        )
    signal = next_signal(desired, state)
    if signal is not None:
        return ConditionState(
            "True",
            IN_PROGRESS_REASONS[signal],
            f"the engine is {state}; the operator sends {signal} to reach {desired}",
        )
    return ConditionState("True", "Starting", "the pods are ready; waiting for the engine to report its state")


def _engine_condition(inputs: StatusInputs, states: tuple[EngineState, ...], words: str) -> ConditionState:
    if inputs.should_have_pods and inputs.is_unreachable:
        return _unreachable(inputs)
    state = inputs.engine_state
    reason = "NoEngine" if state is None else f"Engine{state.capitalize()}"
    return ConditionState("True", reason, words) if state in states else ConditionState("False", reason, "")


def _why(status: ConditionStatus, view: ReplicaGroupView, inputs: StatusInputs) -> ConditionState:
    """The condition of a replica group that is not ready."""
    cause = wait_reason(view, inputs)
    return ConditionState(status, cause.reason, cause.message)


def _ready_groups(inputs: StatusInputs) -> str:
    return f"{inputs.ready_groups} of {len(inputs.groups)} replica groups are ready"


def _waiting_for_groups(inputs: StatusInputs) -> str:
    """The replica groups that have not reached the target state, for the message of a transition that hangs."""
    engine, target = inputs.observed.engine, SETTLED_STATE.get(inputs.desired)
    behind = [replica.group for replica in (engine.replicas if engine else ()) if replica.state is not target]
    return f", waiting for replica group {_listed(behind)}" if behind else ""


def _listed(groups: list[int] | tuple[int, ...]) -> str:
    return ", ".join(str(group) for group in groups)


def _written(
    kind: ConditionType, finding: ConditionState, before: Condition | None, generation: int, now: float
) -> Condition:
    unchanged = before is not None and before.status == finding.status
    return Condition(
        type=kind,
        status=finding.status,
        reason=finding.reason,
        message=finding.message,
        last_transition_time=before.last_transition_time if before and unchanged else timestamp(now),
        observed_generation=generation,
    )
