"""Downloads and unpacks packages of Debian's archive without installing them, and without root.

apt gets a separate sources list and separate state folders, so that the machine's package lists and its lock are not
touched. The archive's address is the one in the machine's configuration.
"""

import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster_support.errors import NoKubernetesError
from cluster_support.processes import run_guarded

SUITE = "bookworm"
"""The suite of the core's source, of the node's tools and of the base image."""
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
TOOLS = ("apt-get", "dpkg-deb", "tar")
FIX = (
    "provide a Kubernetes instead: KUBEBUILDER_ASSETS=<folder with etcd and kube-apiserver>, "
    "or KUBECONFIG=<file> with MEGATRON_TEST_USE_KUBECONFIG=1"
)


def archive_uri() -> str:
    """The address of the machine's Debian archive. Raises NoKubernetesError if there is none."""
    try:
        release = platform.freedesktop_os_release()
    except OSError:
        release = {}
    if release.get("ID") != "debian":
        name = release.get("PRETTY_NAME", platform.system())
        raise NoKubernetesError(f"Kubernetes for the tests is built from Debian's sources, and this is {name}: {FIX}")
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing or not KEYRING.exists():
        wanted = ", ".join(missing or [str(KEYRING)])
        raise NoKubernetesError(f"building Kubernetes needs {wanted}: install it, or {FIX}")
    return _main_archive({release.get("VERSION_CODENAME", SUITE), SUITE, "stable", "oldstable"})


def _main_archive(suites: set[str]) -> str:
    columns = "$(REPO_URI) $(RELEASE) $(COMPONENT)"
    command = ["apt-get", "indextargets", "--format", columns, "Created-By: Packages"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    for line in listed.splitlines():
        uri, _, rest = line.partition(" ")
        suite, _, component = rest.partition(" ")
        if suite in suites and component == "main":
            return uri
    raise NoKubernetesError(f"apt is configured with no Debian archive ({', '.join(sorted(suites))}; main): {FIX}")


@dataclass(frozen=True)
class Apt:
    """apt-get with its state in `folder`."""

    folder: Path
    log: Path

    def update(self, uri: str | None = None, suite: str = SUITE) -> None:
        """Reads the package lists of one suite of an archive, by default the machine's."""
        for name in ("lists/partial", "cache/archives/partial"):
            (self.folder / name).mkdir(parents=True)
        if uri is not None:
            entry = f"[signed-by={KEYRING}] {uri} {suite} main"
            self._sources.write_text(f"deb {entry}\ndeb-src {entry}\n")
        self._run("update", cwd=self.folder)

    def download_source(self, package: str, version: str, into: Path) -> None:
        self._run("source", "--download-only", f"{package}={version}", cwd=into)

    def download(self, packages: Sequence[str], into: Path) -> None:
        self._run("download", *packages, cwd=into)

    def dependencies(self, package: str, *, recursive: bool = False) -> list[str]:
        """The names of the packages that it depends on."""
        kinds = ("pre-depends", "recommends", "suggests", "conflicts", "breaks", "replaces", "enhances")
        flags = [*(f"--no-{kind}" for kind in kinds), *(["--recurse"] if recursive else [])]
        command = ["apt-cache", *self._options(), "depends", *flags, package]
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        names = (line.partition("Depends: ")[2] for line in listed.splitlines())
        return sorted({name for name in names if name and not name.startswith("<")})

    def download_missing(self, *packages: str) -> Path:
        """Downloads packages with the dependencies that this machine lacks; returns their folder."""
        self._run("install", "--download-only", "--yes", "--no-install-recommends", *packages, cwd=self.folder)
        return self.folder / "cache/archives"

    @property
    def _sources(self) -> Path:
        return self.folder / "sources.list"

    def _run(self, *words: str, cwd: Path) -> None:
        run_guarded(["apt-get", "-q", *self._options(), *words], self.log, cwd=cwd)

    def _options(self) -> list[str]:
        options: dict[str, object] = {
            "Dir::State::Lists": self.folder / "lists",
            "Dir::Cache": self.folder / "cache",
            "Acquire::Retries": 3,
            "Debug::NoLocking": "true",  # the lock of dpkg needs root, and protects files that are not written here
        }
        if self._sources.exists():
            options |= {"Dir::Etc::SourceList": self._sources, "Dir::Etc::SourceParts": "/dev/null"}
        if os.geteuid() == 0:
            options["APT::Sandbox::User"] = "root"  # apt's sandbox user has no access to root's home
        return [f"-o{name}={value}" for name, value in options.items()]


def unpack(packages: Path, into: Path, log: Path) -> None:
    """Unpacks every .deb of a folder into one tree."""
    for package in sorted(packages.glob("*.deb")):
        run_guarded(["dpkg-deb", "--extract", package, into], log)
