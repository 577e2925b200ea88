"""Builds the project's images without a registry, and prints their sizes and the folder of the archives.

`python tests/cluster/prepare_images.py`: does the same as the tests on a real node. Load the archives with `docker
load`, `podman load` or `ctr images import`. `--export FOLDER` writes those of a release, operator and runtime for CPUs,
into this folder.
"""

import argparse
import os
import sys
from pathlib import Path

from cluster_support.errors import ClusterSupportError
from cluster_support.progress import say_at_once
from node_support import images, requirements, tools


def main() -> int:
    parser = argparse.ArgumentParser(description="Builds the images without a registry.")
    parser.add_argument(
        "--export", type=Path, metavar="FOLDER", help="write the archives of a release into this folder"
    )
    target = parser.parse_args().export
    try:
        if missing := requirements.why_no_namespaces():
            print(f"error: images cannot be built here: {missing}", file=sys.stderr)
            return 1
        programs = tools.find_or_fetch(os.environ, say_at_once)
        folder = images.build(os.environ, say_at_once, programs)
        if target is not None:
            for image in (images.OPERATOR, images.RUNTIME):
                images.export(image, (target / image.archive).absolute(), os.environ, programs)
    except ClusterSupportError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for name, size in images.sizes(folder).items():
        print(f"{size / 1e6:7.1f} MB  {name}")
    print(f"archives: {target or folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
