"""Finds or builds the Kubernetes for the cluster tests, Helm, a registry, and the programs and images of a node.

`python tests/cluster/prepare.py`: does the same as the tests, before them and with visible progress.
"""

import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for suite_support

from cluster_support import binaries
from cluster_support.errors import ClusterSupportError
from cluster_support.helm import find_helm
from cluster_support.progress import say_at_once
from node_support.fixtures import prepare
from node_support.tools import find_or_fetch_registry


def main() -> int:
    try:
        source = binaries.find(os.environ, say_at_once)
        kubectl = binaries.find_kubectl(os.environ)
        helm = find_helm(os.environ, say_at_once)
    except ClusterSupportError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"cluster tests: {source}; kubectl: {kubectl}; helm: {helm}", flush=True)
    # The workers of pytest would do it too, but without visible output.
    if isinstance(prepared := prepare(source, os.environ, say_at_once), str):
        print(f"cluster tests: {prepared}")
    try:
        find_or_fetch_registry(os.environ, say_at_once)
    except ClusterSupportError as error:
        print(f"cluster tests: there is no registry here: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
