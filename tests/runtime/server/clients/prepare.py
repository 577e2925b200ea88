"""Downloads external clients and peers for the tests: a browser if there is none, packages from npm and PyPI.

`python tests/runtime/server/clients/prepare.py`; the tests themselves download nothing.
"""

import os
import sys
from pathlib import Path

# The cache is shared with the programs of the cluster tests.
sys.path.append(str(Path(__file__).parents[3] / "cluster"))
sys.path.append(str(Path(__file__).parents[2] / "peers"))

from client_support import chromium, further_python, node
from cluster_support.errors import ClusterSupportError
from cluster_support.progress import say_at_once
from peer_support import megatron_core


def main() -> int:
    try:
        browser = chromium.find_or_fetch(os.environ, say_at_once)
        packages = node.find_or_fetch(os.environ, say_at_once)
        python = further_python.find_or_fetch(os.environ, say_at_once)
        megatron = megatron_core.find_or_fetch(os.environ, say_at_once)
    except ClusterSupportError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"tests with clients: {browser}; {packages}; {python}; {megatron}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
