"""Fixtures: a real Kubernetes API, and a namespace in it."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
for folder in (HERE, HERE.parents[1] / "tools"):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))  # for cluster_support; pytest's importlib mode does not add it

from chart_support.fixtures import helm, installer, release  # noqa: E402, F401
from cluster_support import binaries  # noqa: E402
from cluster_support.cluster import Cluster  # noqa: E402
from cluster_support.control_plane import ControlPlane  # noqa: E402
from cluster_support.errors import ClusterSupportError  # noqa: E402
from cluster_support.progress import Say, say_at_once  # noqa: E402
from node_support.fixtures import (  # noqa: E402, F401
    PREPARED,
    own_node,
    prepare,
    prepared_node,
    quickstart,
    real_stage,
    sample,
    stage_cluster,
    stage_namespace,
)
from operator_support.fixtures import (  # noqa: E402, F401
    api,
    chat,
    command_line,
    confined,
    installed,
    machine,
    node,
    operator,
    reader,
    ruled,
    shared_operator,
    stage,
)

SOURCE = pytest.StashKey[binaries.Source | ClusterSupportError]()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Early, so that `-m "not cluster"` sees the mark."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.cluster)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Provides a Kubernetes here, because a build exceeds the timeout of a test, and to show its progress.

    Early, so that the report of the collection includes it.
    """
    if session.config.getoption("collectonly"):
        return
    wanted = {name for item in session.items for name in getattr(item, "fixturenames", ())}
    nodes = {"stage_cluster", "own_node", "prepared_node"}
    if wanted & {"control_plane", "bare_control_plane", *nodes}:
        session.config.stash[SOURCE] = source = _find_source(session.config)
        if wanted & nodes and (prepared := prepare(source, os.environ, _say(session.config))):
            session.config.stash[PREPARED] = prepared


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    """The hook for the header is not called for a conftest in a subfolder."""
    source, prepared = config.stash.get(SOURCE, None), config.stash.get(PREPARED, None)
    return [f"cluster tests: {each}" for each in (source, prepared if isinstance(prepared, str) else None) if each]


def _say(config: pytest.Config) -> Say:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    return reporter.write_line if reporter else say_at_once


def _find_source(config: pytest.Config) -> binaries.Source | ClusterSupportError:
    try:
        return binaries.find(os.environ, _say(config))
    except ClusterSupportError as error:
        return error


@pytest.fixture(scope="session")
def control_plane(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The shared cluster of all tests."""
    source = request.config.stash[SOURCE]
    if isinstance(source, ClusterSupportError):
        pytest.fail(str(source), pytrace=False)
    kubectl = binaries.find_kubectl(os.environ)
    folder = tmp_path_factory.mktemp("control-plane")
    if isinstance(source, binaries.ExternalCluster):
        yield Cluster(source.kubeconfig, kubectl, folder, source)
        return
    with ControlPlane(source, kubectl, folder) as control_plane:
        yield control_plane


@pytest.fixture(scope="module")
def bare_control_plane(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """An empty control plane, for tests that install everything; skipped on a given cluster."""
    source = request.config.stash[SOURCE]
    if isinstance(source, ClusterSupportError):
        pytest.fail(str(source), pytrace=False)
    if isinstance(source, binaries.ExternalCluster):
        pytest.skip(f"installs and removes objects that {source} may have")
    folder = tmp_path_factory.mktemp("bare-control-plane")
    with ControlPlane(source, binaries.find_kubectl(os.environ), folder) as control_plane:
        yield control_plane


@pytest.fixture
def own_control_plane(control_plane: Cluster) -> ControlPlane:
    """The shared cluster, for tests that stop parts of it: skipped on a given cluster."""
    if not isinstance(control_plane, ControlPlane):
        pytest.skip(f"stops parts of the control plane, which is not possible on {control_plane.description}")
    return control_plane


@pytest.fixture
def controllers(control_plane: Cluster) -> None:
    """For tests that need kube-controller-manager."""
    if not control_plane.has_controllers:
        pytest.skip("KUBEBUILDER_ASSETS has no kube-controller-manager")


@pytest.fixture
def namespace(control_plane: Cluster) -> Iterator[str]:
    """A new namespace."""
    name = control_plane.make_namespace()
    yield name
    control_plane.delete_namespace(name)
