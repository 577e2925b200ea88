"""The describe view of one resource as lines of text: state, causes, replica groups, events and the next step. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rich.text import Text

from megatron_operator import names
from megatron_operator.api.parse import InvalidResource, parse_resource
from megatron_operator.api.v1alpha1 import (
    ConditionType,
    Device,
    GpuAllocation,
    MegatronInference,
    MegatronInferenceStatus,
    ReplicaGroupStatus,
    Source,
)
from megatron_operator.commands.next_step import next_step
from megatron_operator.kubernetes.pod_status import observed_pod
from megatron_operator.observed_state import ObservedPod, ObservedState, PodPhase
from megatron_operator.replica_groups import ReplicaGroupState
from megatron_operator.status import old_status
from megatron_operator.status_inputs import ReplicaGroupView, StatusInputs
from megatron_operator.styles import styled
from megatron_operator.timestamps import age, seconds
from megatron_operator.wait_reasons import wait_reason

Object = Mapping[str, Any]

IMPORTANCE = (
    ConditionType.FAILED,
    ConditionType.DEGRADED,
    ConditionType.READY,
    ConditionType.PROGRESSING,
    ConditionType.SUSPENDED,
    ConditionType.PAUSED,
)
"""Order of the conditions. Available only repeats Ready."""
LATEST_EVENTS = 10
NOT_OBSERVED = "no operator has reported on it yet"


@dataclass(frozen=True)
class DescribeView:
    """``pods`` and ``events`` are API objects of the resource; ``now`` is in seconds since the epoch.

    ``hidden`` are messages about objects that could not be read.
    """

    obj: Object
    pods: Sequence[Object]
    events: Sequence[Object]
    now: float
    hidden: tuple[str, ...] = ()

    def lines(self) -> Iterator[str | Text]:
        """All lines, ready to print."""
        yield from self._head()
        yield from self._section("Why", self._conditions())
        yield from self._section("Groups", self._groups())
        yield from self._section("Events", self._events())
        yield from self._section("Next", [next_step(self.obj, self.status, seen=self._is_seen)])

    @cached_property
    def status(self) -> MegatronInferenceStatus:
        return old_status(self.obj)

    @cached_property
    def resource(self) -> MegatronInference | None:
        """None when the spec is invalid; the conditions have the errors."""
        try:
            return parse_resource({**self.obj, "status": self.obj.get("status")})
        except InvalidResource:
            return None

    @cached_property
    def _observed(self) -> tuple[ObservedPod, ...]:
        found = [pod for each in self.pods if (pod := observed_pod(each)) is not None]
        return tuple(sorted(found, key=lambda pod: (pod.group, pod.attempt, pod.index)))

    @property
    def _is_seen(self) -> bool:
        """Whether the operator has reported on the current spec."""
        return bool(self.status.observed_generation >= int(self.obj["metadata"].get("generation") or 0))

    @property
    def _proxied(self) -> str:
        metadata = self.obj["metadata"]
        return f"/api/v1/namespaces/{metadata['namespace']}/services/{names.http_service(metadata['name'])}:http/proxy"

    def _section(self, title: str, lines: Iterator[str | Text] | Sequence[str | Text]) -> Iterator[str | Text]:
        listed = list(lines)
        if listed:
            yield ""
            yield Text(title, style="bold")
            yield from (Text("  ").append_text(line if isinstance(line, Text) else Text(line)) for line in listed)

    def _head(self) -> Iterator[str | Text]:
        metadata = self.obj["metadata"]
        looked = bool(self.obj.get("status"))
        title = Text(f"{metadata['namespace']}/{metadata['name']}  ", style="bold")
        title.append_text(styled(str(self.status.phase)) if looked else Text(NOT_OBSERVED, style="yellow"))
        if self.status.engine_state:
            since = self._ago(self.status.engine_state_time)
            title.append_text(Text(f"  (engine {self.status.engine_state}{since and f' for {since}'})"))
        yield title
        yield from (f"  {name:<9} {words}" for name, words in self._facts())
        for words in self.hidden:
            yield f"  {words}"

    def _facts(self) -> Iterator[tuple[str, str]]:
        metadata, spec = self.obj["metadata"], self.obj.get("spec") or {}
        if looked := metadata.get("deletionTimestamp"):
            yield "deleted", f"{self._ago(looked)} ago; waiting for its children to be deleted"
        generation = metadata.get("generation") or 0
        yield "desired", f"{spec.get('lifecycle', 'Running')} (generation {generation})"
        if not self._is_seen:
            last = self.status.observed_generation
            yield "", f"the operator has not reported on it yet; its last report is on generation {last}"
        if self.resource is not None:
            yield "model", f"{self.resource.served_name}, from {_source(self.resource.spec.model.source)}"
            yield "shape", _shape(self.resource)
        if self.status.url:
            service = self.resource.spec.expose.service.type if self.resource else "ClusterIP"
            yield "endpoint", f"{self.status.url} (Service of type {service})"
            yield "", f"inside the cluster: curl {self.status.url}/models"
            yield "", f"from outside: kubectl get --raw {self._proxied}/v1/models"
        yield "created", f"{self._ago(metadata.get('creationTimestamp'))} ago"

    def _conditions(self) -> Iterator[Text]:
        told: set[str] = set()
        for kind in IMPORTANCE:
            condition = self.status.condition(kind)
            if condition is None or (condition.status == "False" and kind is not ConditionType.READY):
                continue
            if condition.message and condition.message in told:
                continue
            told.add(condition.message)
            line = Text("" if condition.status == "True" else "not " if condition.status == "False" else "maybe ")
            line.append_text(styled(str(kind)) if condition.status == "True" else Text(str(kind)))
            since = self._ago(condition.last_transition_time)
            yield line.append(f" for {since}, {condition.reason}: {condition.message or 'no message'}")

    def _groups(self) -> Iterator[str | Text]:
        if self.resource is None:
            yield from (self._pod(pod) for pod in self._observed)
            return
        observed = ObservedState(now=self.now, pods=self._observed)
        # Only the operator knows the current template hash, from its settings; the youngest pod has it.
        youngest = max(self._observed, key=lambda pod: pod.created_at, default=None)
        inputs = StatusInputs(self.resource, observed, template_hash=youngest.template_hash if youngest else "")
        if not inputs.should_have_pods:
            yield from (self._pod(pod) for pod in self._observed)
            return
        reports = {group.index: group for group in self.status.replica_groups}
        for view in inputs.groups:
            yield from self._group(view, inputs, reports.get(view.group.index))
        beyond = [pod for pod in self._observed if pod.group in inputs.surplus_groups]
        yield from (self._pod(pod, note="no longer desired") for pod in beyond)

    def _group(
        self, view: ReplicaGroupView, inputs: StatusInputs, report: ReplicaGroupStatus | None
    ) -> Iterator[str | Text]:
        group = view.group
        restarts = max(report.restarts if report else 0, group.restarts)
        facts = [f"{group.ready_pods}/{group.size} pods ready"]
        if group.attempt is not None:
            facts.append(f"attempt {group.attempt}")
        facts.append(f"{restarts} of {inputs.policy.max_restarts} restarts")
        line = Text(f"replica group {group.index}  ")
        line.append_text(styled(str(view.state)))
        yield line.append(f"  {', '.join(facts)}")
        if view.state is not ReplicaGroupState.READY:
            reason, words = self._cause(view, inputs)
            yield f"  {reason}: {words}"
        for pod in (*group.old_pods, *group.pods):
            note = "of an earlier attempt" if pod in group.old_pods else ""
            yield Text("  ").append_text(self._pod(pod, note=note))
        if report and report.last_failure and view.state is not ReplicaGroupState.FAILED:
            failure = report.last_failure
            rank = "" if failure.rank is None else f" rank {failure.rank}"
            code = "" if failure.exit_code is None else f" with exit code {failure.exit_code}"
            ago = self._ago(failure.time)
            yield f"  last failure {ago} ago: {failure.pod}{rank} ended{code}: {failure.reason}: {failure.message}"

    def _cause(self, view: ReplicaGroupView, inputs: StatusInputs) -> tuple[str, str]:
        """What the group waits for. The status has the ranks' progress, which only their pods' control APIs report."""
        cause = wait_reason(view, inputs)
        if view.state is ReplicaGroupState.STARTING and cause.reason == "Starting":
            pods = {pod.name for pod in view.group.pods}
            for condition in self.status.conditions:
                if condition.status != "Unknown" and any(pod in condition.message for pod in pods):
                    return condition.reason, condition.message
        return cause.reason, cause.message

    def _pod(self, pod: ObservedPod, *, note: str = "") -> Text:
        line = Text(f"{pod.name}  ")
        line.append_text(styled(_pod_word(pod)))
        facts = [names.LEADER] if pod.leader else []
        facts.append(f"on {pod.node}" if pod.node else "on no node yet")
        if pod.address:
            facts.append(f"at {pod.address}")
        facts.append(f"for {age(self.now - pod.created_at)}")
        line.append(f"  {', '.join([*facts, note] if note else facts)}")
        words = pod.waiting or pod.failure
        return line.append(f": {words.reason}: {words.message}") if words else line

    def _events(self) -> Iterator[str]:
        ordered = sorted(self.events, key=lambda event: _time_of(event) or "")[-LATEST_EVENTS:]
        for event in ordered:
            often = f" ({event['count']} times)" if (event.get("count") or 1) > 1 else ""
            words = " ".join(str(event.get("message") or "").split())
            when = f"{self._ago(_time_of(event))} ago"
            yield f"{when:<12} {event.get('type', ''):<8} {event.get('reason', '')}: {words}{often}"

    def _ago(self, time: str | None) -> str:
        return age(self.now - seconds(time)) if time else ""


def _pod_word(pod: ObservedPod) -> str:
    if pod.deleting:
        return "Ending"
    if pod.phase is PodPhase.RUNNING:
        return "Ready" if pod.ready else "Running, not ready"
    return str(pod.phase)


def _time_of(event: Object) -> str | None:
    times = (event.get("lastTimestamp"), event.get("eventTime"), event["metadata"].get("creationTimestamp"))
    return next((str(time) for time in times if time), None)


def _source(source: Source) -> str:
    if (hub := source.hugging_face) is not None:
        return f"Hugging Face {hub.repo}" + (f", {hub.file}" if hub.file else "") + f" at {hub.revision}"
    if source.object_storage is not None:
        return source.object_storage.uri
    if source.persistent_volume_claim is not None:
        return f"claim {source.persistent_volume_claim.claim_name}, {source.persistent_volume_claim.path}"
    if source.image is not None:
        return f"image {source.image.reference}, {source.image.path}"
    return str(source.path)


def _shape(resource: MegatronInference) -> str:
    spec, sizes = resource.spec, resource.spec.parallelism
    groups = f"{spec.replicas} replica group{'s' if spec.replicas > 1 else ''}"
    ranks = f"{sizes.ranks} rank{'s' if sizes.ranks > 1 else ''}"
    pods = f"{spec.pods_per_group} pod{'s' if spec.pods_per_group > 1 else ''}"
    gpu = (
        "GPU of a resource claim"
        if spec.pods.gpu_allocation is GpuAllocation.RESOURCE_CLAIMS
        else spec.pods.gpu_resource
    )
    device = f"one {gpu} per rank" if spec.pods.device is Device.CUDA else f"on {spec.pods.device}"
    split = f" (tensor {sizes.tensor} x pipeline {sizes.pipeline})" if sizes.ranks > 1 else ""
    return f"{groups} of {ranks}{split} in {pods}, {device}"
