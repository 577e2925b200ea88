"""The distribution of tests to the workers of pytest-xdist: by file, the longest first.

The tests of a file run on one worker, in order, because they share the fixtures of their module. Files that must not
run in parallel are one unit too. They are listed here: pytest 9.2 ignores the group that pytest-xdist 3.8 appends to
the node id of a test with the mark ``xdist_group``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import pytest
from xdist.scheduler import LoadFileScheduling

MACHINE = (
    "tests/cluster/test_node.py",
    "tests/cluster/test_node_serving.py",
    "tests/runtime/server/test_launched_hosts.py",
)
"""Tests that use or change the network namespaces of the machine: some compare these before and after."""
LONG = (
    "tests/cluster/test_node",
    "tests/runtime/server/test_launched_hosts",
    "tests/runtime/server/test_chaos",
    "tests/runtime/server/test_served_answers",
    "tests/e2e/test_local_leader",
    "tests/e2e",
    "tests/runtime/server",
    "tests/runtime/messaging",
    "tests/runtime/parallel",
    "tests/runtime/engine",
    "tests/benchmarks",
    "tests/cluster/test_operator",
    "tests/cluster",
)
"""The slowest tests, the longest first: started last, one of them would run alone on a single worker.

Those of the cluster come after the others, because their shared control plane runs to the end.
"""


class FileScheduling(LoadFileScheduling):
    """A unit of work is a file or a group of files; units start in the order of the collection."""

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith("tests/cluster/") and os.environ.get("MEGATRON_TEST_USE_KUBECONFIG", "0") not in ("", "0"):
            return "cluster"  # a given cluster has room for one operator
        file = nodeid.partition("::")[0]
        return "machine" if file in MACHINE else file


def longest_first(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """The items with the slowest files first; items of a file stay together and in order."""
    return sorted(items, key=lambda item: _rank(item.nodeid))


def _rank(nodeid: str, long: Sequence[str] = LONG) -> int:
    return next((rank for rank, prefix in enumerate(long) if nodeid.startswith(prefix)), len(long))
