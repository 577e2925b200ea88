"""Fixtures: a real Kubernetes API, and a namespace in it."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
for folder in (HERE, HERE.parents[1] / "tools"):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))  # cluster_support lies here, and importlib mode puts nothing on the path

from chart_support.fixtures import helm, release  # noqa: E402, F401
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
    real_stage,
    sample,
    stage_cluster,
    stage_namespace,
)
from operator_support.fixtures import api, chat, confined, installed, node, operator, ruled, stage, typed  # noqa: E402, F401

SOURCE = pytest.StashKey[binaries.Source | ClusterSupportError]()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """First, so that `-m "not cluster"` sees the mark."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.cluster)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Here, since a build lasts longer than any one test may, and its progress should be seen.

    First, so that the report of the collection can name what was found.
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
    """The header's own hook is not called for a conftest this far below the root."""
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
    """The cluster that all tests share."""
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
    """One that nothing was installed on, for tests that install everything; skipped where a cluster was given."""
    source = request.config.stash[SOURCE]
    if isinstance(source, ClusterSupportError):
        pytest.fail(str(source), pytrace=False)
    if isinstance(source, binaries.ExternalCluster):
        pytest.skip(f"installs and removes what {source} may have")
    folder = tmp_path_factory.mktemp("bare-control-plane")
    with ControlPlane(source, binaries.find_kubectl(os.environ), folder) as control_plane:
        yield control_plane


@pytest.fixture
def own_control_plane(control_plane: Cluster) -> ControlPlane:
    """The same, for tests that stop parts of it: skipped on a cluster that was given."""
    if not isinstance(control_plane, ControlPlane):
        pytest.skip(f"stops parts of the control plane, which {control_plane.description} would not survive")
    return control_plane


@pytest.fixture
def controllers(control_plane: Cluster) -> None:
    """For tests that need kube-controller-manager."""
    if not control_plane.has_controllers:
        pytest.skip("KUBEBUILDER_ASSETS holds no kube-controller-manager")


@pytest.fixture
def namespace(control_plane: Cluster) -> Iterator[str]:
    """A new one each time."""
    name = control_plane.make_namespace()
    yield name
    control_plane.delete_namespace(name)
