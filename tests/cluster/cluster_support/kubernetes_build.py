"""A Kubernetes for the tests from Debian's packages alone: a current server of custom resources, and an older core.

No package has the servers of a current Kubernetes. Custom resources are what the project is about, so the server of
custom resources is a current one (`apiextensions_build.py`); pods, RBAC and the rest are `core_build.py`'s.
"""

from pathlib import Path

from cluster_support import apiextensions_build, core_build
from cluster_support.progress import Progress

RECIPE = 1
"""Changes with what is built, so that an older build in the cache is not taken for it."""
PROGRAMS = (*apiextensions_build.PROGRAMS, *core_build.COMPILED)


def build(workspace: Path, progress: Progress) -> Path:
    """Builds in an empty folder; returns the folder in it that holds PROGRAMS."""
    made = apiextensions_build.build(workspace / "apiextensions", progress)
    for program in core_build.build(workspace / "core", progress).iterdir():
        program.rename(made / program.name)
    return made
