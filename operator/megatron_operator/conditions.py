"""The conditions of a resource, one function for each type."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_operator import names
from megatron_operator.api.v1alpha1 import Condition, ConditionType, Status
from megatron_operator.api.v1alpha1.status import ConditionStatus
from megatron_operator.groups import Standing
from megatron_operator.lifecycle import IN_BETWEEN, SETTLED_STATE, next_signal
from megatron_operator.picture import ENGINE_UNREACHABLE, GroupView, Picture
from megatron_operator.story import why_not_ready
from megatron_operator.timestamps import timestamp
from megatron_operator.world import EngineState, Signal

HOLDS_REQUESTS = (EngineState.PAUSED, EngineState.SUSPENDING, EngineState.SUSPENDED, EngineState.RESUMING)
GROUP_FAILED = "GroupFailed"
ASLEEP = "AutoSuspended"
UNDER_WAY = {
    Signal.PAUSE: "Pausing",
    Signal.UNPAUSE: "Unpausing",
    Signal.SUSPEND: "Suspending",
    Signal.RESUME: "Resuming",
}


@dataclass(frozen=True)
class Finding:
    """A condition without its times."""

    status: ConditionStatus
    reason: str
    message: str


AS_EXPECTED = Finding("False", "AsExpected", "")
"""What a condition that tells of trouble says while there is none."""


def find_conditions(picture: Picture) -> dict[ConditionType, Finding]:
    """All conditions of the resource."""
    return {
        ConditionType.READY: ready(picture),
        ConditionType.AVAILABLE: available(picture),
        ConditionType.PROGRESSING: progressing(picture),
        ConditionType.PAUSED: paused(picture),
        ConditionType.SUSPENDED: suspended(picture),
        ConditionType.DEGRADED: degraded(picture),
        ConditionType.FAILED: failed(picture),
    }


def written(findings: dict[ConditionType, Finding], before: Status, generation: int, now: float) -> list[Condition]:
    """The findings as conditions; the time of one whose status is as before stays."""
    return [_written(kind, finding, before.condition(kind), generation, now) for kind, finding in findings.items()]


def sleeps(status: Status) -> bool:
    """Whether a status tells of an engine that is suspended until the next request."""
    condition = status.condition(ConditionType.READY)
    return condition is not None and condition.reason == ASLEEP


def ready(picture: Picture) -> Finding:
    """True while requests are answered."""
    if not picture.wants_pods:
        return _leaving(picture)
    if picture.leading_group.given_up is not None:
        return _why("False", picture.leading_group, picture)
    if picture.is_unreachable:
        return _unreachable(picture)
    if not picture.is_open:
        return _not_up_yet(picture)
    return _by_engine_state(picture)


def available(picture: Picture) -> Finding:
    """True while requests are answered, by however few groups."""
    found = ready(picture)
    if found.status == "True":
        reason = found.reason if found.reason == ASLEEP else "EngineRunning"
        return Finding("True", reason, f"requests are answered; {_ready_groups(picture)}")
    return found


def progressing(picture: Picture) -> Finding:
    """True while something is on its way to the wished state."""
    if not picture.wants_pods:
        found = _leaving(picture)
        return Finding("True" if picture.world.pods else "False", found.reason, found.message)
    if picture.has_lost_its_keys:
        secret = names.keys_secret(picture.resource.name)
        words = f"the Secret {secret} was removed: all pods finish their requests and end, then others get new keys"
        return Finding("True", "RotatingKeys", words)
    moving = [view for view in picture.groups if view.standing is not Standing.READY and view.given_up is None]
    if moving:
        return _why("True", moving[0], picture)
    if picture.surplus_groups:
        groups = _listed(picture.surplus_groups)
        return Finding("True", "ScalingDown", f"group {groups} finishes its requests and is removed")
    given_up = [view for view in picture.groups if view.given_up is not None]
    if picture.outdated_groups and not given_up:
        words = f"group {_listed(picture.outdated_groups)} still runs the former template; one is replaced at a time"
        return Finding("True", "RollingOut", words)
    if picture.leading_group.given_up is None:
        found = _lifecycle_progress(picture)
        if found.status != "False" or not given_up:
            return found
    return _why("False", given_up[0], picture)


def paused(picture: Picture) -> Finding:
    """True while the engine holds its requests."""
    return _engine_condition(picture, HOLDS_REQUESTS, "requests are held until the engine is unpaused")


def suspended(picture: Picture) -> Finding:
    """True while the memory of the KV cache is given back."""
    return _engine_condition(picture, (EngineState.SUSPENDED,), "the memory of the KV cache is given back")


def degraded(picture: Picture) -> Finding:
    """True while something does not work as it should, and the operator is on it or needs help."""
    if not picture.wants_pods:
        return AS_EXPECTED
    if picture.problems:
        return Finding("True", "ApplyFailed", "; ".join(picture.problems))
    if picture.troubled_groups:
        causes = [why_not_ready(view, picture) for view in picture.troubled_groups]
        given_up = [view.given_up.reason for view in picture.troubled_groups if view.given_up is not None]
        return Finding("True", (given_up or [GROUP_FAILED])[0], "; ".join(cause.message for cause in causes))
    overdue = picture.world.now - picture.state_since
    if picture.engine_state in IN_BETWEEN and overdue > picture.policy.transition_timeout:
        since = f"since {timestamp(picture.state_since)}, longer than {picture.policy.transition_timeout.text}"
        return Finding("True", "TransitionTimeout", f"the engine is {picture.engine_state} {since}{_laggards(picture)}")
    return AS_EXPECTED


def failed(picture: Picture) -> Finding:
    """True when nothing is served and the operator has given up."""
    if picture.wants_pods and picture.leading_group.given_up is not None:
        return _why("True", picture.leading_group, picture)
    return AS_EXPECTED


def _leaving(picture: Picture) -> Finding:
    left = ", ".join(pod.name for pod in picture.world.pods)
    if picture.resource.deleting:
        return Finding("False", "Terminating", f"the resource is being deleted; waiting for {left or 'nothing more'}")
    if left:
        return Finding("False", "Stopping", f"lifecycle is Stopped; waiting for {left} to finish and end")
    return Finding("False", "Stopped", "lifecycle is Stopped: there are no pods; set it to Running to start again")


def _unreachable(picture: Picture) -> Finding:
    assert picture.leader is not None
    engine = picture.world.engine
    cause = engine.message if engine is not None else "its control API was not asked"
    message = f"the leader {picture.leader.name} runs but does not answer ({cause}); no signal is sent meanwhile"
    return Finding("Unknown", ENGINE_UNREACHABLE, message)


def _not_up_yet(picture: Picture) -> Finding:
    if picture.problems and not picture.world.pods:
        return Finding("False", "ApplyFailed", "; ".join(picture.problems))
    view = picture.leading_group
    if picture.leader is None and picture.ready_groups:
        words = "no pod leads at the moment: the first pod of a group that serves is about to; requests wait meanwhile"
        return Finding("False", "LeaderMoving", words)
    if view.standing is Standing.READY and picture.leader is not None:
        words = f"{picture.leader.name} is up; waiting for its engine to register with the coordinator"
        return Finding("False", "Registering", words)
    return _why("False", view, picture)


def _by_engine_state(picture: Picture) -> Finding:
    state = picture.engine_state
    if picture.sleeps and not picture.troubled_groups:
        return Finding("True", ASLEEP, "the engine is suspended for want of requests; the next one wakes it")
    match state:
        case EngineState.RUNNING if picture.troubled_groups:
            groups = f"{picture.ready_groups} of {len(picture.groups)} replica groups serve"
            return Finding("True", "Degraded", f"{groups}; see the condition Degraded")
        case EngineState.RUNNING:
            return Finding("True", "EngineRunning", "requests are answered")
        case EngineState.PAUSED:
            return Finding("False", "Paused", "the engine is paused: requests are accepted and wait")
        case EngineState.SUSPENDED:
            return Finding("False", "Suspended", "the engine is suspended: requests are accepted and wait")
        case EngineState.STOPPED | None:
            return Finding("False", "EngineStopped", "the engine has stopped; its pods are about to end")
        case _:
            reason = IN_BETWEEN[state]
            return Finding("False", reason, f"the engine is {state}{_laggards(picture)}; requests wait")


def _lifecycle_progress(picture: Picture) -> Finding:
    state, wish = picture.engine_state, picture.wish
    if picture.is_unreachable:
        return _unreachable(picture)
    if picture.sleeps:
        return Finding("False", "Settled", f"{_ready_groups(picture)} and the engine sleeps until the next request")
    if state is SETTLED_STATE[wish]:
        return Finding("False", "Settled", f"{_ready_groups(picture)} and the engine is {state}, as wished")
    if state in IN_BETWEEN:
        return Finding("True", IN_BETWEEN[state], f"the engine is {state} on its way to {wish}{_laggards(picture)}")
    signal = next_signal(wish, state)
    if signal is not None:
        return Finding("True", UNDER_WAY[signal], f"the engine is {state} and is asked to {signal}; the wish is {wish}")
    return Finding("True", "Starting", "the pods are ready; waiting for the engine to report its state")


def _engine_condition(picture: Picture, states: tuple[EngineState, ...], words: str) -> Finding:
    if picture.wants_pods and picture.is_unreachable:
        return _unreachable(picture)
    state = picture.engine_state
    reason = "NoEngine" if state is None else f"Engine{state.capitalize()}"
    return Finding("True", reason, words) if state in states else Finding("False", reason, "")


def _why(status: ConditionStatus, view: GroupView, picture: Picture) -> Finding:
    """What an unready group waits for, as the finding of a condition."""
    cause = why_not_ready(view, picture)
    return Finding(status, cause.reason, cause.message)


def _ready_groups(picture: Picture) -> str:
    return f"{picture.ready_groups} of {len(picture.groups)} replica groups are ready"


def _laggards(picture: Picture) -> str:
    """The groups that have not got to the state that most transitions end in, for transitions that hang."""
    engine, target = picture.world.engine, SETTLED_STATE.get(picture.wish)
    behind = [replica.group for replica in (engine.replicas if engine else ()) if replica.state is not target]
    return f", waiting for group {_listed(behind)}" if behind else ""


def _listed(groups: list[int] | tuple[int, ...]) -> str:
    return ", ".join(str(group) for group in groups)


def _written(kind: ConditionType, finding: Finding, before: Condition | None, generation: int, now: float) -> Condition:
    unchanged = before is not None and before.status == finding.status
    return Condition(
        type=kind,
        status=finding.status,
        reason=finding.reason,
        message=finding.message,
        last_transition_time=before.last_transition_time if before and unchanged else timestamp(now),
        observed_generation=generation,
    )
