"""The images of a release, as archives for `docker load`.

With Docker's buildx they are built from the Dockerfiles and the package index. Without Docker, as root on Debian,
buildah builds them as for the tests on a real node.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from image_archives import normalize_archive
from release_archives import ReleaseError

BUILDERS = ("buildx", "buildah")
REGISTRY = "localhost/megatron-inference"
"""The path in the names of the images, which no registry serves; the names get that of a registry when published."""


@dataclass(frozen=True)
class ReleaseImage:
    """An image: its name, the end of its tag, its Dockerfile, and the build argument DEVICE, if it has one."""

    name: str
    dockerfile: str
    device: str | None = None

    def tag(self, version: str) -> str:
        return f"{version}-{self.device}" if self.device else version

    def archive(self, version: str) -> str:
        return f"{self.name}-{self.tag(version)}.tar"


IMAGES = (
    ReleaseImage("operator", "operator/Dockerfile"),
    ReleaseImage("runtime", "runtime/Dockerfile", "cpu"),
    ReleaseImage("runtime", "runtime/Dockerfile", "cuda"),
)


def build_images(root: Path, folder: Path, version: str, revision: str, date: int, builder: str) -> None:
    """Builds the images with one of BUILDERS, or the first that works here for `auto`. Raises ReleaseError."""
    chosen = builder if builder != "auto" else "buildx" if _has_buildx() else "buildah"
    if chosen == "buildx":
        for image in IMAGES:
            _run(buildx_command(image, folder, version, revision), root, {"SOURCE_DATE_EPOCH": str(date)})
        return
    _run([sys.executable, "tests/cluster/prepare_images.py", "--export", str(folder)], root, {})
    for image in IMAGES:
        normalize_archive(folder / image.archive(version), date, revision)


def buildx_command(image: ReleaseImage, folder: Path, version: str, revision: str) -> list[str]:
    """The command that builds an image with the times of SOURCE_DATE_EPOCH, and writes its archive."""
    device = [] if image.device is None else [f"--build-arg=DEVICE={image.device}"]
    name = f"{REGISTRY}/{image.name}:{image.tag(version)}"
    return [
        "docker", "buildx", "build", f"--file={image.dockerfile}", f"--tag={name}",
        f"--build-arg=VERSION={version}", f"--build-arg=REVISION={revision}", *device, "--provenance=false",
        f"--output=type=docker,dest={folder / image.archive(version)},rewrite-timestamp=true", ".",
    ]  # fmt: skip


def _has_buildx() -> bool:
    """Whether Docker's daemon and buildx are there."""
    if shutil.which("docker") is None:
        return False
    checks = (["docker", "buildx", "version"], ["docker", "info"])
    return all(subprocess.run(check, capture_output=True, check=False).returncode == 0 for check in checks)


def _run(command: list[str], root: Path, variables: dict[str, str]) -> None:
    done = subprocess.run(command, cwd=root, env={**os.environ, **variables}, check=False)
    if done.returncode != 0:
        raise ReleaseError(f"{' '.join(command)}: exit status {done.returncode}; IMAGES=none builds the rest")
