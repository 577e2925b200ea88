"""Debian's Go compiler, unpacked without installation."""

import os
from dataclasses import dataclass
from pathlib import Path

from cluster_support.processes import run_guarded
from cluster_support.progress import Progress


@dataclass(frozen=True)
class Go:
    """Compiles sources below ``gopath`` in GOPATH mode: Debian packages Go libraries as source trees.

    Its own files are below ``workspace``.
    """

    goroot: Path
    gopath: Path
    workspace: Path

    @property
    def environment(self) -> dict[str, str]:
        return {
            "PATH": f"{self.goroot}/bin:{os.environ['PATH']}",
            "GOROOT": str(self.goroot),
            "GOPATH": str(self.gopath),
            "GOCACHE": str(self.workspace / "gocache"),
            "GOTMPDIR": str(self.workspace),
            "HOME": str(self.workspace),
            "GO111MODULE": "off",
            "GOTOOLCHAIN": "local",
            "GOFLAGS": "",
            "CGO_ENABLED": "0",
        }

    def build(self, cwd: Path, progress: Progress, *words: str | Path) -> None:
        """Runs ``go build``. Raises CommandFailedError."""
        log = self.workspace / "go.log"
        command = [self.goroot / "bin/go", "build", "-v", "-trimpath", *words]
        run_guarded(command, log, cwd=cwd, env=self.environment, on_wait=lambda: _say_packages(log, progress))


def version_flags(version: str, *packages: str) -> str:
    """The flag that sets the version of Kubernetes, such as 1.20.2, in these packages, and omits debug symbols."""
    major, minor, _ = version.split(".")
    values = {"gitVersion": f"v{version}", "gitMajor": major, "gitMinor": minor, "gitTreeState": "clean"}
    stamps = [f"-X {package}.{name}={value}" for package in packages for name, value in values.items()]
    return " ".join(["-ldflags=-s -w", *stamps])


def _say_packages(log: Path, progress: Progress) -> None:
    with log.open("rb") as lines:
        progress(f"  {sum(1 for _ in lines)} packages compiled or in progress")
