"""The programs for a node, and for building and publishing images, from Debian's packages, without installation."""

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from cluster_support import debian
from cluster_support.cache import Kept, cache_folder, kept
from cluster_support.processes import run_guarded
from cluster_support.progress import Progress, Say

PACKAGES = (
    "buildah",
    "busybox-static",
    "conntrack",
    "containerd",
    "containernetworking-plugins",
    "iproute2",
    "iptables",
    "mmdebstrap",
    "runc",
    "socat",
)
IPTABLES = ("iptables", "iptables-restore", "iptables-save", "ip6tables", "ip6tables-restore", "ip6tables-save")
NEEDED = ("containerd", "containerd-shim-runc-v2", "ctr", "runc", "xtables-nft-multi", "buildah", "iptables", "ip")


OF_A_REGISTRY = ("docker-registry", "skopeo")
"""A registry, and a program that copies images to it; packages of Debian with these names."""


class NodeTools:
    """``environment`` is the environment of the programs."""

    def __init__(self, folder: Path) -> None:
        self._root = folder / "root"
        programs = [folder / "links", *(self._root / name for name in ("usr/bin", "usr/sbin", "bin", "sbin"))]
        self._path = os.pathsep.join(map(str, [*programs, os.environ.get("PATH", os.defpath)]))
        self.cni = self._root / "usr/lib/cni"
        self.signature_policy = self._root / "etc/containers/policy.json"

    @property
    def environment(self) -> dict[str, str]:
        libraries = [self._root / "usr/lib/x86_64-linux-gnu", self._root / "lib/x86_64-linux-gnu"]
        return {
            "PATH": self._path,
            "LD_LIBRARY_PATH": os.pathsep.join(map(str, libraries)),
            "XTABLES_LIBDIR": str(libraries[0] / "xtables"),
        }

    def program(self, name: str) -> Path:
        """The path of a program, which may also be an installed one. Raises FileNotFoundError."""
        found = shutil.which(name, path=self._path)
        if found is None:
            raise FileNotFoundError(name)
        return Path(found)

    def has(self, *names: str) -> bool:
        return all(shutil.which(name, path=self._path) for name in names)

    @property
    def are_complete(self) -> bool:
        return self.cni.is_dir() and self.has(*NEEDED)


def find_or_fetch(env: Mapping[str, str], say: Say) -> NodeTools:
    """Raises ClusterSupportError."""
    folder = cache_folder(env) / f"node-tools-{debian.SUITE}"
    effort = "60 MB to download"
    return NodeTools(kept(Kept("NodeTools", folder, effort, lambda made: NodeTools(made).are_complete, _fetch), say))


def find_or_fetch_registry(env: Mapping[str, str], say: Say) -> NodeTools:
    """The programs OF_A_REGISTRY. Raises ClusterSupportError."""
    folder = cache_folder(env) / f"registry-tools-{debian.SUITE}"

    def fetch(workspace: Path, progress: Progress) -> Path:
        return _unpack(OF_A_REGISTRY, workspace, progress)

    def are_complete(made: Path) -> bool:
        return NodeTools(made).has(*OF_A_REGISTRY)

    return NodeTools(kept(Kept("RegistryTools", folder, "10 MB to download", are_complete, fetch), say))


def _fetch(workspace: Path, progress: Progress) -> Path:
    made = _unpack(PACKAGES, workspace, progress)
    (made / "links").mkdir()
    # One program with several names; Debian creates the links when the package is installed.
    several = NodeTools(made).program("xtables-nft-multi")
    for name in IPTABLES:
        inside = several.is_relative_to(made)
        (made / "links" / name).symlink_to(os.path.relpath(several, made / "links") if inside else several)
    run_guarded([made / "links/iptables", "--version"], workspace / "log", env=NodeTools(made).environment)
    return made


def _unpack(packages: Sequence[str], workspace: Path, progress: Progress) -> Path:
    """Downloads packages with what they need and this machine lacks; returns the folder with their files in `root`."""
    log, made = workspace / "log", workspace / "made"
    apt = debian.Apt(workspace / "apt", log)
    progress("reading the package lists")
    apt.update()
    progress(f"downloading {', '.join(packages)}")
    (made / "root").mkdir(parents=True)
    debian.unpack(apt.download_missing(*packages), made / "root", log)
    return made
