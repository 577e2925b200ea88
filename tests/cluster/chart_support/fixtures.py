"""Fixtures of the chart's tests, imported by tests/cluster/conftest.py."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from chart_support.helm import NAMESPACE, Helm
from chart_support.release import Release
from cluster_support.control_plane import ControlPlane
from cluster_support.helm import find_helm
from cluster_support.progress import say_at_once
from cluster_support.reader import reader_of
from suite_support.doc_shell import DocShell

from megatron_operator.api.v1alpha1 import GROUP, PLURAL


@pytest.fixture(scope="session")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    """Helm without a cluster."""
    return Helm(find_helm(os.environ, say_at_once), tmp_path_factory.mktemp("helm"))


@pytest.fixture
def release(helm: Helm, bare_control_plane: ControlPlane, tmp_path: Path) -> Iterator[Release]:
    """A release that is not installed yet; removed after the test, with its CRD and all resources."""
    ours = Helm(helm.program, tmp_path / "helm", bare_control_plane.kubeconfig)
    if not bare_control_plane.exists("namespace", NAMESPACE):
        bare_control_plane.kubectl("create", "namespace", NAMESPACE)
    yield Release(ours, bare_control_plane, tmp_path)
    ours("uninstall", "megatron", "--namespace", NAMESPACE, "--ignore-not-found")
    bare_control_plane.kubectl("delete", "crd", f"{PLURAL}.{GROUP}", "--ignore-not-found")


@pytest.fixture
def installer(release: Release, bare_control_plane: ControlPlane, tmp_path: Path) -> DocShell:
    """A reader of the docs who installs the release, with the namespace `default`."""
    return reader_of(bare_control_plane, tmp_path / "reader", "default", release.helm.program)
