"""The distribution of tests to the workers of pytest-xdist: by file, the longest first, those that wait beside others.

The tests of a file run on one worker, in order, because they share the fixtures of their module. Files that must not
run in parallel are one unit too. They are listed here: pytest 9.2 ignores the group that pytest-xdist 3.8 appends to
the node id of a test with the mark ``xdist_group``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import pytest
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

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
CLUSTER = "tests/cluster/"
CLUSTER_SHARE = 0.4
"""Of the workers: those that begin with the tests of the cluster, which take this share of the time of all tests."""


class FileScheduling(LoadFileScheduling):
    """A unit of work is a file or a group of files; units start in the order of the collection.

    The first workers begin with the files of the cluster, which wait for most of their time, and the others with the
    rest, which compute: a core has work while a test waits, and fewer workers start a control plane. A worker takes
    units of the other kind when none of its own kind is left.
    """

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith(CLUSTER) and os.environ.get("MEGATRON_TEST_USE_KUBECONFIG", "0") not in ("", "0"):
            return CLUSTER  # a given cluster has room for one operator
        file = nodeid.partition("::")[0]
        return "machine" if file in MACHINE else file

    def _assign_work_unit(self, node: WorkerController) -> None:
        number, first = int(node.gateway.id.removeprefix("gw")), max(1, round(CLUSTER_SHARE * self.numnodes))
        own = (scope for scope in self.workqueue if scope.startswith(CLUSTER) == (number < first))
        self.workqueue.move_to_end(next(own, next(iter(self.workqueue))), last=False)
        super()._assign_work_unit(node)


def longest_first(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """The items with the slowest files first; items of a file stay together and in order."""
    return sorted(items, key=lambda item: _rank(item.nodeid))


def _rank(nodeid: str, long: Sequence[str] = LONG) -> int:
    return next((rank for rank, prefix in enumerate(long) if nodeid.startswith(prefix)), len(long))
