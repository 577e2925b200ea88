"""Fixtures of the chart's tests; tests/cluster/conftest.py takes them over."""

import os

import pytest
from chart_support.helm import Helm
from cluster_support.helm import find_helm
from cluster_support.progress import say_at_once


@pytest.fixture(scope="session")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    """Helm without a cluster."""
    return Helm(find_helm(os.environ, say_at_once), tmp_path_factory.mktemp("helm"))
