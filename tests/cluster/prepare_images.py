"""Builds the project's images without a registry, and prints their sizes and the folder of the archives.

`python tests/cluster/prepare_images.py`: does the same as the tests on a real node. Load the archives with `docker
load`, `podman load` or `ctr images import`. `--export FOLDER` writes those of a release into this folder: operator and
runtime, for CPUs and with CUDA. The one with CUDA is built for it, and tried as pods run it, without a GPU.
"""

import argparse
import os
import sys
from pathlib import Path

from cluster_support.cache import cache_folder
from cluster_support.errors import ClusterSupportError
from cluster_support.progress import say_at_once
from node_support import images, requirements, tools
from node_support.container import run_in_image

HERE = Path(__file__).parent
CHECKS = HERE / "node_support/inside_cuda_image.py"
COMPILE_AHEAD = HERE.parent / "runtime/gpu/gpu_support/compile_ahead.py"


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
        sizes = images.sizes(folder)
        if target is not None:
            for image in images.RELEASED:
                sizes[image.name] = images.export(image, (target / image.archive).absolute(), os.environ, programs)
            try_image_with_cuda(programs)
    except ClusterSupportError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for name, size in sizes.items():
        print(f"{size / 1e6:7.1f} MB  {name}")
    print(f"archives: {target or folder}")
    return 0


def try_image_with_cuda(programs: tools.NodeTools) -> None:
    """Runs `inside_cuda_image.py` in the image, and prints what it found. Raises ClusterSupportError."""
    say_at_once(f"trying {images.RUNTIME_FOR_CUDA.name}")
    model = cache_folder(os.environ) / "models" / images.MODEL
    mounts = {"/try/model.gguf": model, "/try/checks.py": CHECKS, "/try/compile_ahead.py": COMPILE_AHEAD}
    with images.builder(images.RUNTIME_FOR_CUDA, os.environ, programs) as builder:
        log = builder.workspace / "checks"
        command = ["python3", "/try/checks.py", "/try/model.gguf"]
        run_in_image(builder, images.RUNTIME_FOR_CUDA, command, mounts, log)
        say_at_once("\n".join(line for line in log.read_text().splitlines() if line.startswith("check_")))


if __name__ == "__main__":
    sys.exit(main())
