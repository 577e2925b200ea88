"""Builds the project's images without a registry, and prints their sizes and the folder of the archives.

`python tests/cluster/prepare_images.py`: does the same as the tests on a real node. Load the archives with `docker
load`, `podman load` or `ctr images import`.
"""

import os
import sys

from cluster_support.errors import ClusterSupportError
from cluster_support.progress import say_at_once
from node_support import images, requirements, tools


def main() -> int:
    try:
        if missing := requirements.why_no_namespaces():
            print(f"error: images cannot be built here: {missing}", file=sys.stderr)
            return 1
        folder = images.build(os.environ, say_at_once, tools.find_or_fetch(os.environ, say_at_once))
    except ClusterSupportError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for name, size in images.sizes(folder).items():
        print(f"{size / 1e6:7.1f} MB  {name}")
    print(f"archives: {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
