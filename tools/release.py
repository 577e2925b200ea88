"""Builds the files of a release into a folder: wheel, sdist, chart, images, SBOMs and their checksums.

``python tools/release.py``, from the repository's root. The same commit gives the same bytes: all times are that of the
commit, or SOURCE_DATE_EPOCH. docs/releasing.md describes how to publish them.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from release_archives import ReleaseError, build_distributions, package_chart
from release_images import BUILDERS, build_images
from release_sbom import CONTENTS, write_sbom_of_image, write_sboms

CHECKSUMS = "SHA256SUMS"
EPOCH_VARIABLE = "SOURCE_DATE_EPOCH"


def source_date(root: Path) -> int:
    """Seconds since 1970 of the release: SOURCE_DATE_EPOCH, else the time of the commit. Raises ReleaseError."""
    text = os.environ.get(EPOCH_VARIABLE) or _git(root, "log", "-1", "--format=%ct")
    if not text.isdecimal():
        raise ReleaseError(f"{EPOCH_VARIABLE}: {text!r} is not a number of seconds since 1970")
    return int(text)


def revision(root: Path) -> str:
    """The commit, with a mark if files differ from it."""
    commit = _git(root, "rev-parse", "HEAD")
    return f"{commit}-modified" if _git(root, "status", "--porcelain") else commit


def write_checksums(folder: Path) -> Path:
    """Writes the SHA-256 of every file, for ``sha256sum --check``."""
    lines = []
    for path in sorted(folder.iterdir()):
        with path.open("rb") as file:
            lines.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {path.name}\n")
    (folder / CHECKSUMS).write_text("".join(lines))
    return folder / CHECKSUMS


def release(root: Path, folder: Path, images: str) -> None:
    """Builds everything into an empty folder. Raises ReleaseError."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    version, date = project["version"], source_date(root)
    build_distributions(root, folder, date)
    package_chart(root / "charts" / "megatron-inference", folder, version, date)
    if images == "none":
        write_sboms(project, folder, date)
    else:
        build_images(root, folder, version, revision(root), date, images)
        for image in CONTENTS:
            write_sbom_of_image(image, project, folder, date)
    write_checksums(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description="Builds the files of a release.")
    parser.add_argument("--dist", type=Path, default=Path("dist"), help="folder of the files; it is emptied first")
    parser.add_argument("--images", choices=("auto", "none", *BUILDERS), default="auto", help="how to build the images")
    arguments = parser.parse_args()
    folder = arguments.dist.absolute()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        release(Path.cwd(), folder, arguments.images)
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    for path in sorted(folder.iterdir()):
        print(f"{path.stat().st_size / 1e6:8.1f} MB  {path}")
    return 0


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ReleaseError(f"git {' '.join(words)}: {done.stderr.strip()}; set {EPOCH_VARIABLE} outside a checkout")
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
