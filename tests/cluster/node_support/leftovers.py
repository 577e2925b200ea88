"""Objects that a node could leave on the outer machine."""

import subprocess
from pathlib import Path

from node_support.machine import PREFIX, hierarchies
from node_support.tools import NodeTools

FOLDERS = ("/var/lib/kubelet", "/var/lib/cni", "/var/log/pods", "/var/log/containers", "/run/containerd", "/etc/cni")

Things = dict[str, frozenset[str]]


def leftovers(tools: NodeTools, before: Things | None = None) -> Things:
    """The objects by kind, without those from ``before`` and without kinds that have none.

    An object from before may be gone: a node that starts removes what a killed one has left.
    """
    known = before or {}
    found = {kind: objects - known.get(kind, frozenset()) for kind, objects in _objects(tools).items()}
    return {kind: objects for kind, objects in found.items() if objects}


def _objects(tools: NodeTools) -> Things:
    return {
        "cgroups": frozenset(str(folder) for each in hierarchies() for folder in each.glob(f"{PREFIX}*")),
        "kubepods": frozenset(str(folder) for each in hierarchies() for folder in each.glob("kubepods*")),
        "mounts": frozenset(line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()),
        "network namespaces": frozenset(_names(Path("/run/netns"))),
        "links": frozenset(_names(Path("/sys/class/net"))),
        "folders": frozenset(folder for folder in FOLDERS if Path(folder).exists()),
        "rules": frozenset(_rules(tools)),
    }


def _names(folder: Path) -> list[str]:
    return [each.name for each in folder.iterdir()] if folder.is_dir() else []


def _rules(tools: NodeTools) -> list[str]:
    """The rules of the packet filter, without empty chains."""
    saved = subprocess.run([tools.program("iptables-save")], env=tools.environment, capture_output=True, text=True)
    return [line for line in saved.stdout.splitlines() if line.startswith("-")]
