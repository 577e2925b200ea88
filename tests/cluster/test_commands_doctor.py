"""`doctor` on a real cluster, with and without an operator."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from chart_support.helm import Helm
from cluster_support.cluster import Cluster
from operator_support.api import Api, Json
from operator_support.command_line import CommandLine
from operator_support.fixtures import MANIFESTS, SYSTEM
from operator_support.node import SimulatedNode, now
from operator_support.resource import Resource, manifest
from suite_support import yaml_documents
from suite_support.definition import without_rules


class ReadyNode(SimulatedNode):
    """Every pod is ready at once."""

    async def start(self, pod: Json) -> None:
        ready = [
            {"type": kind, "status": "True", "lastTransitionTime": now()[:19] + "Z"}
            for kind in ("Ready", "ContainersReady")
        ]
        await self.report(pod, {"phase": "Running", "podIP": "127.1.2.3", "conditions": ready})

    async def stop(self, pod: Json, grace_seconds: float) -> None:
        """Nothing to stop."""


@pytest.fixture
async def willing_node(api: Api, installed: Cluster) -> AsyncIterator[ReadyNode]:  # noqa: ARG001
    async with ReadyNode(api, SYSTEM) as node:
        yield node


def deployment(**pod_spec: Any) -> Json:
    found: Json = next(
        each
        for each in yaml_documents.load_all((MANIFESTS / "operator.yaml").read_text())
        if each["kind"] == "Deployment"
    )
    found["spec"]["template"]["spec"] |= pod_spec
    return found


@pytest.fixture
def deployed(installed: Cluster, controllers: None) -> Iterator[Cluster]:  # noqa: ARG001
    """A cluster with the operator's Deployment."""
    installed.apply(SYSTEM, deployment())
    yield installed
    installed.kubectl("-n", SYSTEM, "delete", "deployment", "megatron-operator", "--wait=true")


def lines_of(output: str, subject: str) -> list[str]:
    return [line for line in output.splitlines() if f" {subject} " in line[:24] + " "]


async def test_a_cluster_without_an_operator_lacks_it(command_line: CommandLine) -> None:
    done = await command_line.run("doctor")
    assert done.code == 1
    assert lines_of(done.out, "operator")[0].startswith("missing  operator        the cluster has no Deployment of it")
    assert "helm install megatron charts/megatron-inference" in done.out
    assert lines_of(done.out, "definition")[0].startswith("ok ")
    assert lines_of(done.out, "NetworkPolicy")[0].startswith("unknown ")


@pytest.mark.usefixtures("willing_node")
async def test_a_complete_cluster_is_reported_as_such(deployed: Cluster, command_line: CommandLine) -> None:
    words = ("-n", SYSTEM, "rollout", "status", "deployment/megatron-operator", "--timeout=50s")
    await asyncio.to_thread(deployed.kubectl, *words)
    done = await command_line.run("doctor")
    assert (done.code, done.out.splitlines()[-1]) == (0, "no prerequisite is missing")
    account = f"system:serviceaccount:{SYSTEM}:megatron-operator"
    assert f"{account} has all rights that the operator needs" in done.out
    assert f"{SYSTEM}/megatron-operator runs as localhost/megatron-inference/operator" in done.out
    assert deployed.version in lines_of(done.out, "API server")[0]
    assert lines_of(done.out, "rules")[0].startswith("ok" if deployed.knows_cel else "warn")


async def test_an_operator_that_does_not_start_or_may_not_act_is_found(
    deployed: Cluster, command_line: CommandLine
) -> None:
    deployed.apply(SYSTEM, deployment(serviceAccountName="default"))
    done = await command_line.run("doctor")
    assert done.code == 1
    assert "0 of 1 pods are available" in done.out
    assert f"kubectl -n {SYSTEM} describe deployment megatron-operator" in done.out
    (rights,) = lines_of(done.out, "permissions")
    assert rights.startswith(f"missing  permissions     system:serviceaccount:{SYSTEM}:default may not get megatron")
    assert "create pods" in rights


@pytest.mark.usefixtures("willing_node")
async def test_an_operator_that_may_not_hold_its_lease_is_found(deployed: Cluster, command_line: CommandLine) -> None:
    binding = deployed.get("rolebinding", "megatron-operator-lease", "-n", SYSTEM)
    await asyncio.to_thread(deployed.kubectl, "-n", SYSTEM, "delete", "rolebinding", "megatron-operator-lease")
    try:
        done = await command_line.run("doctor")
    finally:
        kept = {"name": "megatron-operator-lease"}
        deployed.apply(SYSTEM, {**binding, "metadata": kept})
    (rights,) = lines_of(done.out, "permissions")
    assert rights.endswith("may not create leases, get leases megatron-operator, update leases megatron-operator")


async def test_an_activator_that_may_not_read_the_keys_of_a_model_is_found(
    chat: Resource, installed: Cluster, helm: Helm, command_line: CommandLine
) -> None:
    idle = {"idleAfter": "1h", "stopAfter": "1h"}
    users = {"apiKeysSecret": {"name": "users"}}
    await chat.apply(manifest(lifecycle="Stopped", autoSuspend=idle, frontend=users))
    done = await command_line.run("doctor")
    (line,) = lines_of(done.out, "activator")
    assert line.endswith("no Deployment of it, so the pods of chat are never stopped (spec.autoSuspend.stopAfter)")
    assert line.startswith("warn ")
    kinds = ("ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Deployment")
    rendered = [
        each
        for each in helm.template("--set=activator.enabled=true")
        if each["kind"] in kinds and "activator" in each["metadata"]["name"]
    ]
    installed.apply(SYSTEM, *rendered)
    try:
        done = await command_line.run("doctor")
    finally:
        for each in rendered:
            installed.kubectl("-n", SYSTEM, "delete", each["kind"], each["metadata"]["name"])
    assert "activator: 0 of 2 pods are available" in done.out
    (rights,) = lines_of(done.out, "permissions")
    assert rights.startswith(f"missing  permissions     system:serviceaccount:{SYSTEM}:megatron-megatron-inference-")
    assert rights.endswith("may not get secrets users")
    assert "activator.apiKeySecrets" in done.out


@pytest.mark.usefixtures("node")
async def test_the_keys_of_secrets_that_models_refer_to_are_checked(chat: Resource, command_line: CommandLine) -> None:
    hub = {"repo": "my/model", "tokenSecret": {"name": "hub", "key": "token"}}
    users = {"apiKeysSecret": {"name": "users"}}
    await chat.kubectl("create", "secret", "generic", "hub", "--from-literal=password=never-output")
    await chat.apply(manifest(lifecycle="Stopped", model={"source": {"huggingFace": hub}}, frontend=users))
    done = await command_line.run("doctor")
    assert done.code == 1
    assert "missing  Secret hub      has no token, which a model in this namespace uses; it has: password" in done.out
    assert "missing  Secret users    does not exist, and a model in this namespace uses it" in done.out
    assert "never-output" not in done.out


@pytest.mark.usefixtures("node")
async def test_the_requirements_of_the_models_in_the_namespace_are_checked(
    chat: Resource, command_line: CommandLine
) -> None:
    on_claim = {"persistentVolumeClaim": {"claimName": "weights"}}
    pods = {"device": "cuda", "gpuResource": "example.com/gpu", "runtimeClassName": "nvidia"}
    template = {"spec": {"runtimeClassName": "gvisor"}}
    spec = {"lifecycle": "Stopped", "pods": pods, "podTemplate": template}
    await chat.apply(manifest(**spec, model={"source": on_claim}))
    done = await command_line.run("doctor")
    assert done.code == 1
    assert "missing  GPUs            no node offers example.com/gpu, which models in this namespace request" in done.out
    assert "missing  claim weights   does not exist" in done.out
    assert "missing  RuntimeClass    models in this namespace use gvisor, nvidia; the cluster has: none" in done.out


@pytest.mark.usefixtures("own_control_plane")
async def test_rules_that_the_definition_lacks_are_found_by_a_dry_run(
    ruled: Cluster, command_line: CommandLine
) -> None:
    definition = yaml_documents.load((MANIFESTS / "crd.yaml").read_text())
    ruled.define(without_rules(definition))
    try:
        done = await command_line.run("doctor")
    finally:
        ruled.define(definition)
    assert lines_of(done.out, "rules")[0].startswith("warn ")
    assert lines_of(done.out, "definition")[0].startswith("ok ")


async def test_a_missing_namespace_is_reported(installed: Cluster) -> None:
    done = await CommandLine(installed.kubeconfig, "nowhere").run("doctor")
    assert done.code == 1
    assert "kubectl create namespace nowhere" in done.out


async def test_objects_without_permission_are_unknown_and_not_missing(installed: Cluster, chat: Resource) -> None:
    await chat.kubectl("create", "serviceaccount", "guest")
    guest = CommandLine(installed.kubeconfig_for("guest", chat.namespace), chat.namespace)
    done = await guest.run("doctor")
    assert (done.code, done.err) == (0, "")
    assert lines_of(done.out, "operator")[0].startswith("unknown  operator        deployments.apps is forbidden")
    assert "no prerequisite is missing; " in done.out.splitlines()[-1]
