"""The health rules for Argo CD and Flux in docs/gitops.md, on statuses that the operator writes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import cel
import pytest
import yaml
from lupa.lua51 import LuaRuntime
from planning_support.planning import Planning
from planning_support.resources import resource_object

from megatron_operator.api.parse import InvalidResource, parse_resource
from megatron_operator.idle_stop import STOP_DELAY
from megatron_operator.observed_state import Failure, PodPhase
from megatron_operator.settings import Settings
from megatron_operator.status import as_json, invalid_status

PAGE = (Path(__file__).parents[2] / "docs" / "gitops.md").read_text()
OBJECTS = {
    obj["kind"]: obj for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.S) for obj in [yaml.safe_load(block)]
}
LUA = OBJECTS["ConfigMap"]["data"]["resource.customizations.health.inference.megatron.dev_MegatronInference"]
(CEL,) = OBJECTS["Kustomization"]["spec"]["healthCheckExprs"]

Object = dict[str, Any]


def in_argo_cd(obj: Object) -> str:
    """Its rules run in Lua 5.1."""
    lua = LuaRuntime(unpack_returned_tuples=True)
    lua.globals().obj = lua.table_from(json.loads(json.dumps(obj)), recursive=True)
    return str(lua.execute(LUA)["status"])


def in_flux(obj: Object) -> str:
    """A resource whose generation was not observed yet is in progress, without any rule."""
    if obj["status"].get("observedGeneration") != obj["metadata"]["generation"]:
        return "in progress"
    spec = {"lifecycle": "Running", **obj["spec"]}
    for verdict in ("failed", "current"):
        if cel.evaluate(CEL[verdict], {"status": obj["status"], "spec": spec}):
            return verdict
    return "in progress"


def with_status(planning: Planning) -> Object:
    return {**resource_object(**planning.spec), "status": as_json(planning.status)}


def settled(lifecycle: str, **spec: Any) -> Planning:
    planning = Planning(**spec).settled()
    planning.spec["lifecycle"] = lifecycle
    for _ in range(6):
        planning.round()
        planning.cluster.advance_engine()
        for name in [pod.name for pod in planning.cluster.pods.values() if pod.deleting]:
            planning.cluster.remove(name)
    planning.round()
    return planning


@pytest.mark.parametrize("lifecycle", ["Running", "Paused", "Suspended", "Stopped"])
def test_a_resource_in_its_desired_state_is_healthy(lifecycle: str) -> None:
    obj = with_status(settled(lifecycle))
    assert obj["status"]["phase"] == lifecycle
    assert (in_argo_cd(obj), in_flux(obj)) == ("Healthy", "current")


def test_an_engine_that_was_suspended_because_it_was_idle_is_healthy() -> None:
    planning = Planning(autoSuspend={"idleAfter": "1m"}).settled()
    planning.cluster.fall_asleep()
    planning.round()
    planning.round()
    obj = with_status(planning)
    assert obj["status"]["phase"] == "Suspended"
    assert (in_argo_cd(obj), in_flux(obj)) == ("Healthy", "current")


def test_a_model_that_was_stopped_because_it_was_idle_is_healthy() -> None:
    planning = Planning(autoSuspend={"idleAfter": "1m", "stopAfter": "1m"})
    planning.settings = Settings(has_activator=True)
    planning.settled()
    planning.cluster.fall_asleep()
    planning.round()
    planning.cluster.now += 60
    planning.round()
    planning.cluster.now += STOP_DELAY
    for _ in range(5):
        planning.round()
        planning.cluster.start_all()
    obj = with_status(planning)
    assert obj["status"]["phase"] == "Stopped"
    assert (in_argo_cd(obj), in_flux(obj)) == ("Healthy", "current")


@pytest.mark.parametrize("lifecycle", ["Paused", "Suspended", "Stopped"])
def test_a_resource_on_its_way_is_in_progress(lifecycle: str) -> None:
    planning = Planning().settled()
    planning.spec["lifecycle"] = lifecycle
    planning.round()
    planning.round()
    assert (in_argo_cd(with_status(planning)), in_flux(with_status(planning))) == ("Progressing", "in progress")


def test_a_new_resource_and_a_generation_that_was_not_observed_are_in_progress() -> None:
    planning = Planning()
    planning.round()
    planning.round()
    starting, edited, new = with_status(planning), with_status(settled("Running")), resource_object()
    edited["metadata"]["generation"] = 2
    for obj in (starting, edited, {**new, "status": {}}):
        assert (in_argo_cd(obj), in_flux(obj)) == ("Progressing", "in progress")
    assert in_argo_cd(new) == "Progressing"


def test_a_resource_that_failed_is_unhealthy() -> None:
    planning = Planning(failurePolicy={"maxRestarts": 0}).settled()
    planning.cluster.fail("chat-0-0-0")
    planning.round()
    planning.round()
    obj = with_status(planning)
    assert obj["status"]["phase"] == "Failed"
    assert (in_argo_cd(obj), in_flux(obj)) == ("Degraded", "failed")


def test_an_invalid_resource_is_unhealthy() -> None:
    obj = resource_object(replicas=0)
    with pytest.raises(InvalidResource) as invalid:
        parse_resource(obj)
    obj["status"] = as_json(invalid_status(obj, invalid.value.errors, 0))
    assert (in_argo_cd(obj), in_flux(obj)) == ("Degraded", "failed")


def test_a_resource_with_a_replica_group_that_is_down_is_degraded() -> None:
    planning = Planning(replicas=2).settled()
    planning.cluster.fail("chat-1-0-0")
    planning.round()
    planning.round()
    assert (in_argo_cd(with_status(planning)), in_flux(with_status(planning))) == ("Degraded", "in progress")


def test_a_stalled_rollout_is_unhealthy_although_requests_are_answered() -> None:
    planning = Planning(replicas=2).settled()
    planning.spec["image"] = "registry.example.com/missing:1"
    for _ in range(6):
        planning.round()
        for name, pod in list(planning.cluster.pods.items()):
            if pod.deleting:
                planning.cluster.remove(name)
            elif pod.phase is PodPhase.PENDING:
                planning.cluster.change(name, waiting=Failure("ImagePull", "no such image"))
    obj = with_status(planning)
    conditions = {each["type"]: each for each in obj["status"]["conditions"]}
    assert conditions["Ready"]["status"] == "True"
    assert conditions["Degraded"]["reason"] == "RolloutStalled"
    assert (in_argo_cd(obj), in_flux(obj)) == ("Degraded", "failed")
