"""The first process of a node's machine: prepares its file systems and network, prints `ready`, and then reaps orphans.

Usage: `first_process.py FOLDER ADDRESS MASK EXTRA_ADDRESS...`. Folders, /run, cgroups and kernel settings that kubelet,
containerd and runc require are private copies, with their contents in FOLDER: the outer machine is not changed. The
node's address is that of a bridge without ports. Uses only the standard library.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
COPIED = ("/etc", "/opt", "/var")
"""Overlays of the outer folders; writes stay inside."""
WANTED = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}
"""Settings that the kubelet would set for the whole kernel: it sees files that have these values already."""
NETWORK = {"ipv4/ip_forward": "1", "bridge/bridge-nf-call-iptables": "1"}
"""Settings of the network namespace."""


def run(*words: str) -> None:
    subprocess.run(words, check=True)


def mount_cgroups() -> None:
    """Mounts them again, because the inherited mounts show the outer machine's."""
    kinds = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        if kind in ("cgroup", "cgroup2"):
            kinds.append((Path(before.split()[4]), kind, options))
    run("umount", "--lazy", "--recursive", str(CGROUPS))
    run("mount", "-t", "tmpfs", "tmpfs", str(CGROUPS))
    for folder, kind, options in kinds:
        folder.mkdir(parents=True)
        chosen = [word for word in options.split(",") if word not in ("rw", "ro")]
        named = [word for word in chosen if word.startswith("name=")]
        words = ["-o", ",".join(["none", *named] if named else chosen)] if kind == "cgroup" else []
        run("mount", "-t", kind, *words, "cgroup", str(folder))


def mount_folders(folder: Path) -> None:
    run("mount", "-t", "tmpfs", "tmpfs", "/run")
    for name in COPIED:
        written, work = (folder / kind / name.lstrip("/") for kind in ("written", "work"))
        written.mkdir(parents=True)
        work.mkdir(parents=True)
        run("mount", "-t", "overlay", "-o", f"lowerdir={name},upperdir={written},workdir={work}", "overlay", name)


def mount_settings(folder: Path) -> None:
    for name, value in WANTED.items():
        shown = folder / "settings" / name
        shown.parent.mkdir(parents=True, exist_ok=True)
        shown.write_text(f"{value}\n")
        run("mount", "--bind", str(shown), f"/proc/sys/{name}")
    for name, value in NETWORK.items():
        setting = Path("/proc/sys/net", name)
        if setting.exists():
            setting.write_text(value)


def make_network(address: str, mask: str, extra: list[str]) -> None:
    run("ip", "link", "set", "lo", "up")
    run("ip", "link", "add", "node0", "type", "bridge")
    run("ip", "address", "add", f"{address}/{mask}", "dev", "node0")
    for each in extra:
        run("ip", "address", "add", f"{each}/32", "dev", "node0")
    run("ip", "link", "set", "node0", "up")
    run("ip", "route", "add", "default", "via", address, "dev", "node0")


def wait_for_orphans() -> None:
    while True:
        try:
            os.wait()
        except ChildProcessError:
            time.sleep(0.2)


def main(folder: Path, address: str, mask: str, extra: list[str]) -> None:
    # A shell script may ignore it, which would be inherited.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    run("hostname", "node")
    mount_cgroups()
    mount_folders(folder)
    make_network(address, mask, extra)
    mount_settings(folder)
    (folder / "ready").touch()
    wait_for_orphans()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:])
