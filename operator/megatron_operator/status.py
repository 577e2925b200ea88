"""The status of a resource, as a pure function of the resource and the observed state: no clock, no client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from megatron_operator import names
from megatron_operator.api.parse import FieldError
from megatron_operator.api.v1alpha1 import (
    ConditionType,
    LastFailure,
    LeaderStatus,
    Lifecycle,
    MegatronInference,
    MegatronInferenceStatus,
    Phase,
    ReplicaGroupStatus,
)
from megatron_operator.conditions import ConditionState, compute_conditions, written
from megatron_operator.leader_selection import current_leader
from megatron_operator.observed_state import EngineState, ObservedState, PodPhase
from megatron_operator.render import image_of
from megatron_operator.rollout import rollout_budget
from megatron_operator.settings import Settings
from megatron_operator.status_inputs import ReplicaGroupView, StatusInputs
from megatron_operator.timestamps import timestamp

INVALID_SPEC = "InvalidSpec"

_PHASES = {
    EngineState.RUNNING: Phase.RUNNING,
    EngineState.PAUSING: Phase.RUNNING,
    EngineState.PAUSED: Phase.PAUSED,
    EngineState.UNPAUSING: Phase.PAUSED,
    EngineState.SUSPENDING: Phase.PAUSED,
    EngineState.SUSPENDED: Phase.SUSPENDED,
    EngineState.RESUMING: Phase.SUSPENDED,
    EngineState.STOPPING: Phase.TERMINATING,
    EngineState.STOPPED: Phase.TERMINATING,
}
"""During a transition, the phase is that of the state before it."""


def build_status(
    resource: MegatronInference,
    observed: ObservedState,
    settings: Settings | None = None,
    problems: Sequence[str] = (),
) -> MegatronInferenceStatus:
    """The status for ``observed``; ``problems`` are messages about failed actions.

    ``resource.status`` is the previous status: unchanged conditions keep their times.
    """
    settings = settings or Settings()
    template_hash = names.template_hash(resource, image_of(resource, settings))
    budget = rollout_budget(resource, settings)
    inputs = StatusInputs(resource, observed, template_hash, tuple(problems), budget, settings.has_activator, settings)
    idle_stop = inputs.idle_stop.next_record
    generation = resource.metadata.generation
    groups = [_group_status(view, inputs) for view in inputs.all_groups]
    state = inputs.engine_state
    ready = inputs.ready_groups if inputs.should_have_pods else 0
    return MegatronInferenceStatus(
        observed_generation=generation,
        phase=_phase(inputs),
        engine_state=state,
        engine_state_time=timestamp(inputs.state_since) if state else None,
        idle_stop_time=None if idle_stop is None else timestamp(idle_stop),
        activation_time=resource.status.activation_time,
        image=image_of(resource, settings),
        url=observed.url or (names.url(resource.name, resource.namespace) if inputs.has_http_service else None),
        model_name=resource.served_name,
        replicas=len({pod.group for pod in observed.pods}),
        ready_replicas=ready,
        ready=f"{ready}/{resource.spec.replicas}",
        restarts=sum(group.restarts for group in groups),
        selector=names.scale_selector(resource.name),
        leader=_leader_status(inputs),
        replica_groups=groups,
        cache=inputs.cache.status,
        conditions=written(compute_conditions(inputs), resource.status, generation, observed.now),
    )


def invalid_status(obj: Mapping[str, Any], errors: Sequence[FieldError], now: float) -> MegatronInferenceStatus:
    """The status of a resource that cannot be parsed: conditions name the errors, the rest stays as it was."""
    before = old_status(obj)
    generation = int((obj.get("metadata") or {}).get("generation") or 0)
    words = "; ".join(str(error) for error in errors)
    was_ready = before.condition(ConditionType.READY)
    unsure = was_ready is not None and was_ready.status != "False"
    kept = f"{words}. Running pods stay as they are until it is fixed"
    findings = {
        ConditionType.READY: ConditionState("Unknown" if unsure else "False", INVALID_SPEC, kept if unsure else words),
        ConditionType.PROGRESSING: ConditionState("False", INVALID_SPEC, words),
        ConditionType.FAILED: ConditionState("True", INVALID_SPEC, words),
    }
    mended = written(findings, before, generation, now)
    others = [condition for condition in before.conditions if condition.type not in {each.type for each in mended}]
    return before.model_copy(
        update={
            "observed_generation": generation,
            "phase": Phase.FAILED,
            "conditions": sorted([*mended, *others], key=lambda condition: list(ConditionType).index(condition.type)),
        }
    )


def old_status(obj: Mapping[str, Any]) -> MegatronInferenceStatus:
    """The status that the resource has; an empty one when it cannot be parsed."""
    try:
        return MegatronInferenceStatus.model_validate(obj.get("status") or {})
    except ValidationError:
        return MegatronInferenceStatus()


def as_json(status: MegatronInferenceStatus) -> dict[str, Any]:
    """The status as JSON, without unknown values.

    Empty strings are left out too: some old API servers read them as null and reject the status.
    """
    dumped = status.model_dump(mode="json", by_alias=True, exclude_none=True)
    return {field: _without_empty_texts(value) for field, value in dumped.items() if value != ""}


def _without_empty_texts(value: Any) -> Any:
    if isinstance(value, dict):
        return {field: _without_empty_texts(each) for field, each in value.items() if each != ""}
    return [_without_empty_texts(each) for each in value] if isinstance(value, list) else value


def _phase(inputs: StatusInputs) -> Phase:
    if not inputs.should_have_pods:
        gone = not inputs.observed.pods and not inputs.resource.deleting
        return Phase.STOPPED if gone else Phase.TERMINATING
    if inputs.leading_group.given_up is not None:
        return Phase.FAILED
    if inputs.is_unreachable:
        return Phase.DEGRADED
    if inputs.accepts_requests:
        assert inputs.engine_state is not None
        phase = _PHASES[inputs.engine_state]
        return Phase.DEGRADED if phase is Phase.RUNNING and inputs.unrecovered_groups else phase
    if inputs.unrecovered_groups:
        return Phase.DEGRADED
    pod = inputs.leading_group.group.first_pod
    return Phase.PENDING if pod is None or pod.phase is PodPhase.PENDING else Phase.STARTING


def _leader_status(inputs: StatusInputs) -> LeaderStatus | None:
    """Kept without a leader pod, because epochs continue from it."""
    pod = current_leader(inputs.observed.pods)
    if pod is None:
        return inputs.resource.status.leader
    return LeaderStatus(pod=pod.name, replica_group=pod.group, epoch=pod.epoch)


def _group_status(view: ReplicaGroupView, inputs: StatusInputs) -> ReplicaGroupStatus:
    group = view.group
    # A start after a stop begins without restarts.
    forget = inputs.desired is Lifecycle.STOPPED
    return ReplicaGroupStatus(
        index=group.index,
        attempt=group.attempt,
        template_hash=group.template_hash,
        ready_pods=group.ready_pods,
        total_pods=group.size,
        restarts=0 if forget else group.restarts,
        last_failure=None if forget else _last_failure(view, inputs),
    )


def _last_failure(view: ReplicaGroupView, inputs: StatusInputs) -> LastFailure | None:
    """The failure of the latest attempt, or else that of an earlier one."""
    failed = view.failed
    if failed is None:
        return inputs.last_failures.get(view.group.index)
    return LastFailure(
        attempt=failed.attempt,
        pod=failed.pod,
        rank=failed.failure.rank,
        exit_code=failed.failure.exit_code,
        reason=failed.failure.reason,
        message=failed.failure.message,
        disruption=failed.failure.disruption,
        time=timestamp(failed.time),
    )
