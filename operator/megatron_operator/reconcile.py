"""One reconcile round: observe, plan, act, report. Both adapters use it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel

from megatron_operator import kueue, names
from megatron_operator.api.parse import FieldError, InvalidResource, parse_resource
from megatron_operator.api.v1alpha1 import ComputeResources, ConditionType, MegatronInference, MegatronInferenceStatus
from megatron_operator.downloads import DownloadPhase
from megatron_operator.events import Event, events_between
from megatron_operator.names import PodIdentity
from megatron_operator.observed_state import (
    Action,
    ActionRefused,
    AdapterError,
    ApplyChild,
    ClusterAdapter,
    CreatePod,
    CreateSecret,
    DeleteChild,
    KindMissing,
    NamespaceTerminating,
    ObservedState,
    PodPhase,
    SignalRefused,
)
from megatron_operator.plan import Plan, plan
from megatron_operator.render import check_removals, image_of, pod_claims, render_pod
from megatron_operator.replica_groups import pod_is_ready
from megatron_operator.runtime_image import ImageState, runtime_image
from megatron_operator.settings import Settings
from megatron_operator.status import as_json, build_status, invalid_status, old_status
from megatron_operator.timestamps import timestamp

AFTER_ACTIONS = 1.0
"""Seconds to the next round after an action, in case no event reports its effect."""
AFTER_TROUBLE = 3.0
"""Seconds to the next round after a failed action; doubles with each further round that fails."""
LONGEST_AFTER_TROUBLE = 60.0
WHILE_PROGRESSING = 5.0
CLAIMS = "spec.podTemplate.spec.resourceClaims"
NO_CLAIMS = (
    "this API server has no resource claims of pods; upgrade Kubernetes to 1.34 or newer, or enable its feature gate"
    " DynamicResourceAllocation, or use gpuAllocation DevicePlugin without claims"
)
UNUSED_ATTEMPT = 999_999
MAX_FAILED_CREATIONS = 3
"""Pods that a round tries in vain to create before it leaves the other pods to the next round."""


@dataclass(frozen=True)
class ReconcileResult:
    """The result of a round."""

    status: MegatronInferenceStatus
    patch: Mapping[str, Any]
    """The merge patch for the resource's status; empty when the status is unchanged."""
    requeue_after: float | None = None
    """Seconds to the next round at the latest; None to wait for an event."""
    events: tuple[Event, ...] = ()
    observed: ObservedState | None = None
    """The observed state; None when the resource is invalid or the observation failed."""
    problems: tuple[str, ...] = ()
    """Failed observations and actions, as messages."""
    failed: bool = False
    """Whether an action failed that the next round retries."""
    image_state: ImageState = ImageState.CURRENT

    @property
    def is_settled(self) -> bool:
        """Whether nothing changes and nothing is wrong."""
        kinds = (ConditionType.PROGRESSING, ConditionType.DEGRADED)
        found = [self.status.condition(kind) for kind in kinds]
        return all(condition is not None and condition.status == "False" for condition in found)


@dataclass(frozen=True)
class _Outcome:
    problems: tuple[str, ...] = ()
    done: bool = False
    """Whether any action was carried out."""
    failed: bool = False


def validated(obj: Mapping[str, Any], settings: Settings) -> MegatronInference:
    """The parsed resource, after a check that its pods can be rendered. Raises InvalidResource with field, value and
    fix."""
    resource = parse_resource(obj)
    render_pod(resource, PodIdentity(0, 0, 0, True, "", 0), settings)
    check_removals(resource, settings)
    return resource


async def _check_template(resource: MegatronInference, adapter: ClusterAdapter, settings: Settings) -> None:
    """Raises InvalidResource when the cluster knows no field of ``spec.podTemplate.spec`` by that name, before any pod
    is replaced."""
    claims = pod_claims(resource)
    override = {**claims, **resource.spec.pod_template.spec}
    if not _needs_dry_run(resource) or resource.deleting:
        return
    template_hash = names.template_hash(resource, image_of(resource, settings))
    # No attempt has this name, so the dry run meets no existing pod.
    identity = PodIdentity(resource.spec.replicas, UNUSED_ATTEMPT, 0, False, template_hash, 0)
    try:
        dropped = await adapter.dropped_fields(render_pod(resource, identity, settings), override)
    except ActionRefused as refused:
        template = resource.spec.pod_template.spec
        field, value = ("spec.podTemplate.spec", template) if template else ("spec.pods", _dumped(resource.spec.pods))
        fix = f"the API server refuses the pod; correct it: {refused}"
        raise InvalidResource.of(field, value, fix) from refused
    if lost := [path for path in dropped if path.startswith(CLAIMS)]:
        raise InvalidResource.of("spec.pods.resourceClaims", dropped[lost[0]], NO_CLAIMS)
    if dropped:
        fix = "the API server knows no such field of a pod; correct it, or remove it"
        raise InvalidResource([FieldError(path, value, fix) for path, value in dropped.items()])


def _needs_dry_run(resource: MegatronInference) -> bool:
    """Whether the API server may refuse the pod for a field that only it can judge."""
    pods = resource.spec.pods
    return bool(resource.spec.pod_template.spec or pods.resource_claims) or pods.resources != ComputeResources()


def _dumped(part: BaseModel) -> dict[str, Any]:
    return part.model_dump(mode="json", by_alias=True, exclude_defaults=True)


async def reconcile(
    obj: Mapping[str, Any],
    adapter: ClusterAdapter,
    *,
    settings: Settings | None = None,
    failures: int = 0,
    may_upgrade: bool = True,
) -> ReconcileResult:
    """Run one round. It is idempotent.

    ``obj`` is the resource with the status that was last written. For an invalid resource, only the status changes.
    Never raises AdapterError: the status reports failed actions, and the next round retries them after
    ``requeue_after`` seconds, which grows with ``failures``, the number of preceding rounds that failed. Without
    ``may_upgrade`` the pods keep the default image of an earlier operator.
    """
    settings = settings or Settings()
    try:
        resource = validated(obj, settings)
        await _check_template(resource, adapter, settings)
    except InvalidResource as invalid:
        return _result(obj, invalid_status(obj, invalid.errors, time.time()))
    except AdapterError as error:
        return ReconcileResult(old_status(obj), patch={}, requeue_after=AFTER_TROUBLE, problems=(str(error),))
    try:
        observed = await adapter.observe(resource.name, resource.namespace, resource.spec.model.cache)
    except AdapterError as error:
        # Without an observation the status stays as it is.
        return ReconcileResult(old_status(obj), patch={}, requeue_after=AFTER_TROUBLE, problems=(str(error),))
    default = settings.default_image(resource.spec.pods.device.value)
    image = runtime_image(resource, observed, default, may_upgrade=may_upgrade)
    settings = replace(settings, image=image.image)
    planned = plan(resource, observed, settings)
    await asyncio.sleep(0)  # Plan and status of a large resource take tens of milliseconds each.
    try:
        outcome = await _carry_out(resource, planned, adapter)
    except NamespaceTerminating:
        leaving = _on_its_way_out(obj)
        return await reconcile(leaving, adapter, settings=settings, failures=failures, may_upgrade=may_upgrade)
    status = build_status(resource, observed, settings, outcome.problems)
    return replace(
        _result(obj, status),
        requeue_after=_requeue_after(planned, outcome, status, observed, failures),
        observed=observed,
        problems=outcome.problems,
        failed=outcome.failed,
        image_state=image.state,
    )


async def begin(obj: Mapping[str, Any], adapter: ClusterAdapter, *, settings: Settings | None = None) -> None:
    """Create the children and the first pods of a new resource, before the first round.

    No observation precedes this, because existing objects stay as they are. Many new resources thus start their pods
    without waiting for each other's rounds. No pod is created when a child that it needs could not be; the first round
    finds any failure.
    """
    settings = settings or Settings()
    try:
        resource = validated(obj, settings)
        actions = plan(resource, ObservedState(time.time()), settings).actions
    except InvalidResource:
        return
    if _needs_dry_run(resource) or resource.spec.pods_per_group > 1:
        return  # The first round checks the template by a dry run, and the kinds of gang scheduling of the cluster.
    name, namespace = obj["metadata"]["name"], obj["metadata"]["namespace"]
    needed = [action for action in actions if _is_needed_by_pods(action)]
    answers = await asyncio.gather(*(adapter.apply(name, namespace, each) for each in needed), return_exceptions=True)
    for answer in answers:
        if isinstance(answer, AdapterError):
            return
        if isinstance(answer, BaseException):
            raise answer
    try:
        for action in actions:
            if isinstance(action, CreatePod):
                await adapter.apply(name, namespace, action)
    except AdapterError:
        return


async def _carry_out(resource: MegatronInference, planned: Plan, adapter: ClusterAdapter) -> _Outcome:
    """Carry out all actions in order. Skips pods when a child that they need, or several pods, could not be created.

    Raises NamespaceTerminating when the namespace accepts no new objects.
    """
    problems: list[str] = []
    done = child_failed = False
    failed = failed_creations = 0
    for action in planned.actions:
        if isinstance(action, CreatePod) and (child_failed or failed_creations == MAX_FAILED_CREATIONS):
            continue
        try:
            await adapter.apply(resource.name, resource.namespace, action)
            # Kueue follows in its own time, and events of the pods report it.
            done = done or not (isinstance(action, DeleteChild) and action.kind == kueue.WORKLOAD)
        except SignalRefused:
            done = True  # The engine changed its state after the observation; the next round decides anew.
        except NamespaceTerminating:
            raise
        except KindMissing as missing:
            problems.append(str(missing))  # The adapter wakes the loop when the kind is available.
            child_failed = child_failed or _is_needed_by_pods(action)
        except AdapterError as error:
            problems.append(str(error))
            failed += 1
            failed_creations += isinstance(action, CreatePod)
            child_failed = child_failed or _is_needed_by_pods(action)
    return _Outcome(tuple(dict.fromkeys(problems)), done, failed > 0)


def _on_its_way_out(obj: Mapping[str, Any]) -> dict[str, Any]:
    """The resource as if it were being deleted: it goes with its namespace, but may not be marked yet."""
    return {**obj, "metadata": {**obj["metadata"], "deletionTimestamp": timestamp(time.time())}}


def _is_needed_by_pods(action: Action) -> bool:
    if isinstance(action, ApplyChild):
        return action.manifest["kind"] not in (*names.ROUTE_KINDS, names.BUDGET, names.JOB)
    return isinstance(action, CreateSecret)


def _requeue_after(
    planned: Plan, outcome: _Outcome, status: MegatronInferenceStatus, observed: ObservedState, failures: int
) -> float | None:
    delays = [planned.requeue_after]
    progress = status.condition(ConditionType.PROGRESSING)
    if outcome.failed:
        # Time alone may require another plan at any moment, such as a failover; a failed action waits longer each time.
        delays = [None if planned.requeue_after == 0 else planned.requeue_after]
        delays.append(min(LONGEST_AFTER_TROUBLE, AFTER_TROUBLE * 2.0 ** min(failures, 16)))
    elif outcome.done:
        delays.append(AFTER_ACTIONS)
    elif _is_downloading(observed) or (
        progress is not None and progress.status != "False" and not _waits_for_nodes(observed)
    ):
        delays.append(WHILE_PROGRESSING)
    return min((delay for delay in delays if delay is not None), default=None)


def _is_downloading(observed: ObservedState) -> bool:
    """Whether a model cache is being filled, maybe for a stopped resource. Jobs cause no events."""
    return any(each.phase in (DownloadPhase.PENDING, DownloadPhase.RUNNING) for each in observed.downloads)


def _waits_for_nodes(observed: ObservedState) -> bool:
    """Whether all that is missing are pods that have not started. Their events trigger the next round."""
    unready = [pod for pod in observed.pods if not pod_is_ready(pod)]
    return bool(unready) and all(pod.phase is PodPhase.PENDING and not pod.deleting for pod in unready)


def _result(obj: Mapping[str, Any], status: MegatronInferenceStatus) -> ReconcileResult:
    return ReconcileResult(
        status=status,
        patch=status_patch(obj.get("status") or {}, as_json(status)),
        events=events_between(old_status(obj), status),
    )


def status_patch(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The merge patch from ``before`` to ``after``: lists are replaced, removed fields are null."""
    gone = {field: None for field in before if field not in after}
    return {**gone, **{field: value for field, value in after.items() if before.get(field) != value}}
