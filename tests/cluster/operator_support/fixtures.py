"""Fixtures of the tests that run the operator, imported by tests/cluster/conftest.py."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from cluster_support.cluster import Cluster
from cluster_support.control_plane import ControlPlane
from cluster_support.reader import reader_of
from operator_support.api import Api
from operator_support.command_line import CommandLine
from operator_support.operator_process import OperatorProcess, in_the_place_of
from operator_support.process_node import ProcessNode
from operator_support.resource import Resource
from operator_support.scripted_node import ScriptedNode
from suite_support import yaml_documents
from suite_support.doc_shell import DocShell

from megatron_operator.settings import ACTIVATOR_VARIABLE

ROOT = Path(__file__).parents[3]
MANIFESTS = ROOT / "manifests"
SYSTEM = "megatron-system"
ACCOUNT = "megatron-operator"


@pytest.fixture(scope="session")
def installed(control_plane: Cluster) -> Cluster:
    """A cluster with everything in `manifests/` except the Deployment."""
    control_plane.define(yaml_documents.load((MANIFESTS / "crd.yaml").read_text()))
    for name in ("namespace.yaml", "rbac.yaml"):
        control_plane.kubectl("apply", "-f", str(MANIFESTS / name))
    return control_plane


@pytest.fixture
def ruled(installed: Cluster) -> Cluster:
    """The same, if the API server enforces CEL rules."""
    if not installed.knows_cel:
        pytest.skip(f"{installed.description} does not enforce CEL rules")
    return installed


@pytest.fixture(scope="session")
def shared_operator(installed: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatorProcess]:
    """The operator of a release with activators, for all namespaces, with the permissions of its ServiceAccount.

    Whether it runs depends on the test before.
    """
    kubeconfig = installed.kubeconfig_for(ACCOUNT, SYSTEM)
    log = tmp_path_factory.mktemp("operator") / "operator.log"
    process = OperatorProcess(kubeconfig, log, settings={ACTIVATOR_VARIABLE: "true"})
    try:
        yield process
    finally:
        process.stop()


@pytest.fixture
def operator(shared_operator: OperatorProcess, request: pytest.FixtureRequest) -> OperatorProcess:
    """The same while it runs, unless ``confined`` replaces it. A test that stops it need not start it again."""
    if "confined" not in request.fixturenames:
        shared_operator.ensure_started()
    return shared_operator


@pytest.fixture
async def api(control_plane: Cluster) -> AsyncIterator[Api]:
    """Raw access as the administrator."""
    async with Api(control_plane.kubeconfig) as api:
        yield api


@pytest.fixture
def chat(installed: Cluster, operator: OperatorProcess, namespace: str) -> Resource:  # noqa: ARG001
    """The resource `chat`, not created yet, in a new namespace, while the operator runs."""
    return Resource(installed, namespace)


@pytest.fixture
async def confined(
    chat: Resource, operator: OperatorProcess, installed: Cluster, tmp_path: Path
) -> AsyncIterator[OperatorProcess]:
    """An operator with a Role only in the namespace of ``chat``, instead of the one for all namespaces."""
    await chat.kubectl("create", "serviceaccount", "confined")
    cluster_role = next(
        each for each in yaml_documents.load_all((MANIFESTS / "rbac.yaml").read_text()) if each["kind"] == "ClusterRole"
    )
    rules = [rule for rule in cluster_role["rules"] if rule["apiGroups"] != ["apiextensions.k8s.io"]]
    role = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": {"name": "confined"}}
    await chat.apply({**role, "rules": rules})
    subject = f"--serviceaccount={chat.namespace}:confined"
    await chat.kubectl("create", "rolebinding", "confined", "--role=confined", subject)
    kubeconfig = installed.kubeconfig_for("confined", chat.namespace)
    other = OperatorProcess(kubeconfig, tmp_path / "operator.log", namespaces=[chat.namespace])
    with in_the_place_of(operator, other):
        yield other


@pytest.fixture
async def node(own_control_plane: ControlPlane, api: Api, namespace: str) -> AsyncIterator[ScriptedNode]:  # noqa: ARG001
    """A simulated node on which every pod becomes ready by itself."""
    async with ScriptedNode(api, namespace) as node:
        yield node


@pytest.fixture
async def stage(own_control_plane: ControlPlane, api: Api, namespace: str) -> AsyncIterator[ScriptedNode]:  # noqa: ARG001
    """A simulated node whose pods the test controls."""
    async with ScriptedNode(api, namespace, by_itself=False) as node:
        yield node


@pytest.fixture
async def machine(
    own_control_plane: ControlPlane,  # noqa: ARG001  # a cluster that was given has nodes of its own
    api: Api,
    namespace: str,
    tmp_path: Path,
    smollm2_path: Path,
) -> AsyncIterator[ProcessNode]:
    """A node on which pods, also those of downloads, are processes. They have SmolLM2 in /models."""
    async with ProcessNode(api, namespace, tmp_path / "pods", smollm2_path.parent) as node:
        yield node


@pytest.fixture
def command_line(installed: Cluster, namespace: str) -> CommandLine:
    """Commands with the permissions of the administrator."""
    return CommandLine(installed.kubeconfig, namespace)


@pytest.fixture
def reader(installed: Cluster, namespace: str, tmp_path: Path) -> DocShell:
    """A reader of the docs, in the namespace of the test."""
    return reader_of(installed, tmp_path / "reader", namespace)
