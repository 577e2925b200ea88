"""The requirements for a node on this machine."""

import os
import platform
import shutil
from pathlib import Path

from cluster_support import binaries

PROGRAMS = ("apt-get", "dpkg-deb", "mount", "nsenter", "umount", "unshare")
CGROUPS = ("cpu", "cpuset", "devices", "memory", "pids")
NEWEST_MINOR = 26
"""Later kubelets lack --container-runtime and need a newer containerd."""
CAP_SYS_ADMIN, CAP_NET_ADMIN = 21, 12


def why_not(source: binaries.Binaries) -> str | None:
    """The missing requirement of a node; None if a node is possible."""
    if missing := why_no_namespaces():
        return missing
    if source.kubelet is None or source.proxy is None or source.scheduler is None or source.controller_manager is None:
        return f"there is no kubelet, kube-proxy, kube-scheduler or kube-controller-manager beside {source.apiserver}"
    if source.minor > NEWEST_MINOR:
        return f"the node of the tests supports kubelets up to 1.{NEWEST_MINOR}, and this is {source.version}"
    hierarchies = Path("/proc/self/cgroup").read_text()
    if not all(f":{name}:" in hierarchies or f",{name}" in hierarchies for name in CGROUPS):
        return "kubelet 1.20 needs cgroups of version 1"
    return None


def why_no_namespaces() -> str | None:
    """The missing requirement for building images; None if that is possible."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return f"it runs on Linux on x86_64, and this is {platform.system()} on {platform.machine()}"
    if os.geteuid() != 0 or not _may(CAP_SYS_ADMIN) or not _may(CAP_NET_ADMIN):
        return "it requires root with the permission to create namespaces"
    lacking = [name for name in PROGRAMS if shutil.which(name) is None]
    if lacking:
        return f"{', '.join(lacking)} is missing"
    return None


def _may(capability: int) -> bool:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("CapEff:"))
    return bool(int(line.split()[1], 16) >> capability & 1)
