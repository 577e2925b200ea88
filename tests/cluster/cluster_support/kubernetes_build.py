"""Builds a Kubernetes for the tests from Debian's packages: a current server for custom resources, and an older core.

No package has the servers of a current Kubernetes. The project depends mostly on custom resources, so their server is
current (`apiextensions_build.py`); `core_build.py` builds the rest.
"""

from pathlib import Path

from cluster_support import apiextensions_build, core_build
from cluster_support.progress import Progress

RECIPE = 1
"""Increase it when the build changes, so that older builds in the cache are not used."""
PROGRAMS = (*apiextensions_build.PROGRAMS, *core_build.COMPILED)


def build(workspace: Path, progress: Progress) -> Path:
    """Builds in an empty folder; returns its subfolder with PROGRAMS."""
    made = apiextensions_build.build(workspace / "apiextensions", progress)
    for program in core_build.build(workspace / "core", progress).iterdir():
        program.rename(made / program.name)
    return made
