"""Fixtures of the tests on a real node, imported by tests/cluster/conftest.py."""

import asyncio
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from cluster_support import binaries
from cluster_support.binaries import Source
from cluster_support.cluster import Cluster
from cluster_support.errors import ClusterSupportError
from cluster_support.helm import find_helm
from cluster_support.progress import Say, say_at_once
from node_support import requirements
from node_support.node import Node
from node_support.prepared import BUILT, Prepared
from node_support.quickstart import Quickstart
from node_support.stage import OPERATOR_VARIABLE, RUNTIME_VARIABLE, Images, Stage
from operator_support.resource import Json, Resource

PREPARED = pytest.StashKey["Prepared | str"]()


def prepare(source: Source | ClusterSupportError, env: Mapping[str, str], say: Say) -> "Prepared | str | None":
    """Prepares a node, or returns why that is not possible; None with a given cluster, or without any."""
    if not isinstance(source, binaries.Binaries):
        return None
    if missing := requirements.why_not(source):
        return f"a real node is not possible here: {missing}"
    try:
        return Prepared(source, env, say)
    except ClusterSupportError as error:
        return f"a real node is not possible here: {error}"


@pytest.fixture(scope="session")
def prepared_node(request: pytest.FixtureRequest) -> Prepared:
    """The programs and images of a node. Skipped if a node is not possible, or on a given cluster."""
    prepared = request.config.stash.get(PREPARED, None)
    if not isinstance(prepared, Prepared):
        pytest.skip(prepared or "needs its own node")
    return prepared


@pytest.fixture(scope="module")
def own_node(prepared_node: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A cluster of one node, without images of the project: the quickstart loads them."""
    folder = tmp_path_factory.mktemp("node")
    with prepared_node.node(binaries.find_kubectl(os.environ), folder, loaded=()) as node:
        yield node


@pytest.fixture(scope="module")
def quickstart(own_node: Node, prepared_node: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Quickstart:
    """The commands of the README for this node, none of which has run."""
    helm = find_helm(os.environ, say_at_once)
    return Quickstart(own_node, prepared_node, helm, tmp_path_factory.mktemp("quickstart"))


@pytest.fixture(scope="module")
def stage_cluster(request: pytest.FixtureRequest) -> tuple[Cluster, Images]:
    """The cluster of KUBECONFIG with its images, or a new one."""
    prepared = request.config.stash.get(PREPARED, None)
    if prepared is not None:
        return request.getfixturevalue("own_node"), BUILT
    cluster = request.getfixturevalue("control_plane")
    chosen = [os.environ.get(name, "") for name in (OPERATOR_VARIABLE, RUNTIME_VARIABLE)]
    if not all(chosen):
        pytest.skip(
            f"{OPERATOR_VARIABLE} and {RUNTIME_VARIABLE} do not name images that {cluster.description} can pull"
        )
    return cluster, Images(*chosen)


@pytest.fixture(scope="module")
def real_stage(
    request: pytest.FixtureRequest,
    stage_cluster: tuple[Cluster, Images],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Stage]:
    """The chart, installed; on a node of the tests by the commands of the README, which build and load the images."""
    cluster, chosen = stage_cluster
    helm = find_helm(os.environ, say_at_once)
    stage = Stage(cluster, chosen, helm, tmp_path_factory.mktemp("stage"))
    if isinstance(cluster, Node):  # a new cluster is removed as a whole
        request.getfixturevalue("quickstart").run_until("kubectl")
        yield stage
        return
    try:
        stage.install()
        yield stage
    finally:
        stage.remove()


@pytest.fixture(scope="module")
def stage_namespace(real_stage: Stage) -> Iterator[str]:
    """A namespace for the resources of a module."""
    name = real_stage.cluster.make_namespace()
    yield name
    real_stage.cluster.delete_namespace(name)


@pytest.fixture(scope="module")
def sample(request: pytest.FixtureRequest, real_stage: Stage, stage_namespace: str) -> Resource:
    """The unchanged manifests/samples/smollm2.yaml, applied and ready; on a node of the tests as in the README."""
    if isinstance(real_stage.cluster, Node):
        quickstart: Quickstart = request.getfixturevalue("quickstart")
        quickstart.use(stage_namespace)
        quickstart.run_until("kubectl megatron")
    else:
        path = Path(__file__).parents[3] / "manifests/samples/smollm2.yaml"
        real_stage.cluster.kubectl("-n", stage_namespace, "apply", "--validate=false", "-f", str(path))
    resource = Resource(real_stage.cluster, stage_namespace, "smollm2")
    asyncio.run(resource.until(_is_running, "the sample to run", within=240))
    return resource


def _is_running(status: Json) -> bool:
    return status.get("phase") == "Running" and status.get("ready") == "2/2"
