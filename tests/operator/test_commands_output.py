"""The output of the commands for answers of the API server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from megatron_operator.api.v1alpha1 import Lifecycle
from megatron_operator.commands.describe_view import DescribeView
from megatron_operator.commands.errors import CommandFailed, in_words
from megatron_operator.commands.lifecycle_verbs import Verb, check_verb
from megatron_operator.commands.wait import is_reached
from megatron_operator.kubernetes.api_server import ServerError, answer_of
from megatron_operator.kubernetes.user_cluster import UserCluster
from megatron_operator.status import old_status
from megatron_operator.timestamps import age

CLUSTER = cast(UserCluster, SimpleNamespace(server="https://cluster:6443", context="dev"))
BORN = "2026-01-01T00:00:00Z"
NOW = 1767225600.0 + 300


def resource(status: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "inference.megatron.dev/v1alpha1",
        "kind": "MegatronInference",
        "metadata": {"name": "chat", "namespace": "lab", "uid": "1", "generation": 2, "creationTimestamp": BORN},
        "spec": {"model": {"source": {"path": "/models/m.gguf"}}, "pods": {"device": "cpu"}, **spec},
        **({"status": status} if status else {}),
    }


def story(obj: dict[str, Any]) -> str:
    return "\n".join(str(line) for line in DescribeView(obj, [], [], now=NOW).lines())


def condition(kind: str, status: str, reason: str, message: str = "") -> dict[str, str]:
    return {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": BORN}


def test_a_resource_without_a_status_refers_to_the_doctor_command() -> None:
    told = story(resource())
    assert told.startswith("lab/chat  no operator has reported on it yet")
    assert "megatron-operator doctor" in told


def test_describe_reports_a_change_that_the_operator_has_not_observed() -> None:
    status = {"phase": "Running", "observedGeneration": 1, "conditions": [condition("Ready", "True", "EngineRunning")]}
    told = story(resource(status, lifecycle="Paused"))
    assert "desired   Paused (generation 2)" in told
    assert "the operator has not reported on it yet; its last report is on generation 1" in told
    assert "megatron-operator doctor" in told


def test_describe_reports_an_invalid_spec_with_field_and_remedy() -> None:
    words = "spec.replicas: 0: must be at least 1; raise it"
    conditions = [condition("Ready", "False", "InvalidSpec", words), condition("Failed", "True", "InvalidSpec", words)]
    told = story(resource({"phase": "Failed", "observedGeneration": 2, "conditions": conditions}, replicas=0))
    assert told.count(words) == 1
    assert "Failed for 5m, InvalidSpec: " in told
    assert "kubectl edit mi chat -n lab" in told


def test_describe_lists_problems_before_progress_and_omits_healthy_conditions() -> None:
    conditions = [
        condition("Ready", "True", "Degraded", "1 of 2 replica groups serve"),
        condition("Progressing", "True", "BackOff", "group 1 waits"),
        condition("Degraded", "True", "GroupFailed", "group 1 failed"),
        condition("Paused", "False", "AsExpected"),
    ]
    status = {"phase": "Degraded", "observedGeneration": 2, "conditions": conditions}
    why = story(resource(status, replicas=2)).partition("Why\n")[2].partition("\n\n")[0]
    assert [line.split()[0] for line in why.splitlines()] == ["Degraded", "Ready", "Progressing"]


@pytest.mark.parametrize(
    ("phase", "reason", "step"),
    [
        ("Stopped", "Stopped", "megatron-operator start chat -n lab"),
        ("Paused", "Paused", "megatron-operator unpause chat -n lab"),
        ("Suspended", "Suspended", "megatron-operator resume chat -n lab"),
        ("Stopped", "IdleStopped", "send a request through the activator"),
        ("Starting", "ModelLoading", "kubectl get mi chat -n lab --watch"),
        ("Pending", "ImagePull", "correct spec.image"),
    ],
)
def test_the_suggested_command_depends_on_the_problem(phase: str, reason: str, step: str) -> None:
    status = {"phase": phase, "observedGeneration": 2, "conditions": [condition("Ready", "False", reason)]}
    assert step in story(resource(status)).partition("Next\n")[2]


@pytest.mark.parametrize(("reason", "there"), [("IdleStopped", True), ("Stopped", False)])
def test_a_model_that_was_stopped_because_it_was_idle_counts_as_running(reason: str, there: bool) -> None:
    status = {"phase": "Stopped", "observedGeneration": 2, "conditions": [condition("Ready", "False", reason)]}
    assert is_reached(Lifecycle.RUNNING, old_status({"status": status})) == there


@pytest.mark.parametrize(("reason", "there"), [("AutoSuspended", True), ("Suspended", False)])
def test_an_auto_suspended_engine_counts_as_running(reason: str, there: bool) -> None:
    ready = condition("Ready", "True" if there else "False", reason)
    status = {"phase": "Suspended", "engineState": "SUSPENDED", "observedGeneration": 2, "conditions": [ready]}
    told = story(resource(status)).partition("Next\n")[2]
    assert ("chat chat" in told) == there
    assert is_reached(Lifecycle.RUNNING, old_status({"status": status})) == there


def failure_of(status: int, text: str, path: str = "/apis/inference.megatron.dev/v1alpha1/megatroninferences") -> str:
    with pytest.raises(Exception, match=str(status)) as caught:
        answer_of(f"GET {path}", status, text)
    return in_words(caught.value, CLUSTER)  # type: ignore[arg-type]


def test_a_cluster_without_the_crd_gets_the_installation_command() -> None:
    told = failure_of(404, "404 page not found")
    assert told.startswith("MegatronInference is not defined on the cluster of context dev; install it: ")


def test_an_error_of_the_api_server_is_quoted() -> None:
    assert failure_of(500, '{"message": "etcd is gone"}') == "etcd is gone (500)"
    silence = ServerError("GET /x: the API server cannot be reached: no route")
    words = "the API server https://cluster:6443 of context dev does not answer: no route; is the cluster up"
    assert in_words(silence, CLUSTER).startswith(words)


@pytest.mark.parametrize("verb", [Verb.START, Verb.STOP])
@pytest.mark.parametrize("desired", list(Lifecycle))
def test_start_and_stop_are_allowed_in_every_state(verb: Verb, desired: Lifecycle) -> None:
    check_verb(verb, resource(lifecycle=desired.value))


@pytest.mark.parametrize(
    ("verb", "desired", "hint"),
    [
        (Verb.UNPAUSE, "Suspended", "`resume` sets it to Paused, `start` sets it to Running"),
        (Verb.PAUSE, "Suspended", "`resume` sets it to Paused"),
        (Verb.RESUME, "Running", "nothing to resume"),
        (Verb.UNPAUSE, "Stopped", "`start` it"),
    ],
)
def test_an_invalid_verb_is_rejected_with_the_valid_one(verb: Verb, desired: str, hint: str) -> None:
    with pytest.raises(CommandFailed, match=hint):
        check_verb(verb, resource(lifecycle=desired))


def test_a_terminating_resource_rejects_every_verb() -> None:
    obj = resource()
    obj["metadata"]["deletionTimestamp"] = BORN
    with pytest.raises(CommandFailed, match="is being deleted"):
        check_verb(Verb.STOP, obj)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(-5, "0s"), (119, "119s"), (125, "2m5s"), (180, "3m"), (900, "15m"), (4 * 3600 + 60, "4h1m"), (90000, "25h")],
)
def test_ages_are_formatted_as_in_kubectl(seconds: float, words: str) -> None:
    assert age(seconds) == words
