"""The archives of a release: wheel and sdist of the package, and the package of the chart."""

from __future__ import annotations

import gzip
import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import yaml


class ReleaseError(Exception):
    """A file of the release cannot be built; ``str()`` has the cause and the remedy."""


def build_distributions(root: Path, folder: Path, date: int) -> None:
    """Builds wheel and sdist with hatchling, whose archives depend only on the sources and ``date``."""
    command = [sys.executable, "-m", "hatchling", "build", "--directory", str(folder)]
    done = subprocess.run(
        command,
        cwd=root,
        env={**os.environ, "SOURCE_DATE_EPOCH": str(date)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise ReleaseError(f"hatchling could not build the package:\n{done.stdout.strip()}")


def package_chart(chart: Path, folder: Path, version: str, date: int) -> Path:
    """The chart as `helm package` makes it, with all times set to ``date``; Helm itself writes the current time.

    Raises ReleaseError if the chart's version is not that of the package.
    """
    about = yaml.safe_load((chart / "Chart.yaml").read_text())
    for field in ("version", "appVersion"):
        if about[field] != version:
            raise ReleaseError(f"{chart}/Chart.yaml: {field} is {about[field]}, and the package has {version}: set it")
    target = folder / f"{about['name']}-{version}.tgz"
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        # Helm reads Chart.yaml first.
        for path in sorted(chart.rglob("*"), key=lambda path: (path.name != "Chart.yaml", path)):
            if path.is_file():
                entry = tarfile.TarInfo(f"{about['name']}/{path.relative_to(chart)}")
                entry.size, entry.mtime = path.stat().st_size, date
                archive.addfile(entry, io.BytesIO(path.read_bytes()))
    with target.open("wb") as file, gzip.GzipFile("", "wb", fileobj=file, mtime=date) as compressed:
        compressed.write(packed.getvalue())
    return target
