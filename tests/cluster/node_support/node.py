"""A control plane with a real node: kubelet, containerd, kube-proxy and a DNS, in separate namespaces."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cluster_support.binaries import Binaries
from cluster_support.cluster import wait_until
from cluster_support.control_plane import ControlPlane
from cluster_support.errors import CommandFailedError, NotReadyError
from cluster_support.pki import Pki
from cluster_support.processes import GuardedProcess, tail
from node_support import configuration
from node_support.tools import NodeTools

HERE = Path(__file__).parent
PYTHON = [sys.executable, "-I", "-S"]
ENTER = 'for each in /sys/fs/cgroup/*/cgroup.procs; do echo 0 > "$each"; done; exec "$@"'
"""Moves a program into the machine's cgroups, out of those of the process that started it."""
SECONDS_TO_BE_READY = 90.0
SECONDS_TO_REMOVE_A_POD = 120.0
"""Maximum time from the end of a pod's containers until the API server has removed the pod.

It usually takes 5 s. But a kubelet that observes the end of a container before it has stored the container's new state
keeps the container until its garbage collection, once a minute, and reports the pod up to 10 s later.
"""
LONGEST_FOLDER = 66
"""Maximum length of the folder: it contains the kubelet's sockets, whose paths may have 107 characters."""


class Node(ControlPlane):
    """A context manager like ControlPlane. While it runs, `folder` also contains images and containers.

    Everything runs in one PID namespace with one network; kubectl and the tests use one forwarded loopback port.
    """

    def __init__(self, binaries: Binaries, kubectl: Path, folder: Path, tools: NodeTools) -> None:
        self.name = configuration.NODE
        self.tools = tools
        self._machine: GuardedProcess | None = None
        self._first_process = 0
        super().__init__(binaries, kubectl, folder, with_scheduler=True)

    def start(self) -> None:
        if len(str(self.folder)) > LONGEST_FOLDER:
            raise NotReadyError(f"{self.folder}: too long for the paths of sockets; set TMPDIR to a shorter folder")
        self._start_machine()
        super().start()
        self.start_containerd()
        self.start_kubelet()
        proxy = self._write("kube-proxy", configuration.kube_proxy(self._pki))
        self._launch("kube-proxy", _needed(self._binaries.proxy), f"--config={proxy}")
        python, *flags = PYTHON
        dns = [*flags, str(HERE / "dns.py"), str(self._pki.kubeconfig("dns")), configuration.DNS_ADDRESS]
        self._launch("dns", Path(python), *dns)
        wait_until(self.is_node_ready, f"the node to be ready, logs: {self.logs}", SECONDS_TO_BE_READY, every=0.5)

    def stop(self) -> None:
        """Kills everything in the machine, including containers, with its first process."""
        if self._machine is not None:
            self._machine.stop()
            self._machine = None
        super().stop()

    def start_apiserver(self) -> None:
        """Also starts the forwarding of its port, which connects on demand."""
        if "door" not in self._processes:
            door = [*PYTHON, str(HERE / "door.py"), str(self._first_process), str(self._port)]
            self._processes["door"] = GuardedProcess(door, self.logs / "door.log")
        super().start_apiserver()

    def start_containerd(self) -> None:
        config = self._scratch / "containerd.toml"
        config.write_text(configuration.containerd(self._scratch, self.tools))
        self._launch("containerd", self.tools.program("containerd"), f"--config={config}")
        wait_until(self._ctr_answers, f"containerd, log: {self.logs / 'containerd.log'}")

    def start_kubelet(self) -> None:
        (self._scratch / "resolv.conf").touch()
        config = self._write("kubelet", configuration.kubelet(self._scratch, self._pki))
        self._launch(
            "kubelet",
            _needed(self._binaries.kubelet),
            f"--config={config}",
            f"--kubeconfig={self._pki.kubeconfig('kubelet')}",
            f"--hostname-override={self.name}",
            f"--node-ip={configuration.NODE_ADDRESS}",
            "--container-runtime=remote",
            f"--container-runtime-endpoint=unix://{configuration.socket(self._scratch)}",
            f"--root-dir={self._scratch / 'kubelet'}",
            f"--cert-dir={self._scratch / 'kubelet-certificates'}",
            "--v=2",
        )

    def stop_kubelet(self) -> None:
        """Stops the kubelet; its pods keep running."""
        self._end("kubelet")

    def is_node_ready(self) -> bool:
        """The condition Ready in the API server."""
        if not self.exists("node", self.name):
            return False
        conditions = self.get("node", self.name)["status"].get("conditions", [])
        return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)

    def import_image(self, archive: Path) -> None:
        """Imports a tar in OCI's or Docker's format into containerd. Raises CommandFailedError."""
        self.run(*self._ctr("images", "import", str(archive)))

    def run(self, *command: str, timeout: float = 300) -> str:
        """Runs a command inside the machine. Raises CommandFailedError."""
        words = [*self._inside(), *command]
        done = subprocess.run(words, capture_output=True, text=True, env=self._environment, timeout=timeout)
        if done.returncode != 0:
            raise CommandFailedError(f"{' '.join(command)}: exit status {done.returncode}\n{done.stderr.strip()}")
        return done.stdout

    def start_program(self, command: Sequence[str | Path], log: Path) -> GuardedProcess:
        """Starts a command inside the machine; it ends with the machine, or with its `stop`."""
        return self._start_process(command, log)

    def processes(self) -> list[int]:
        """Process ids, on the outer machine, of all processes in the machine."""
        if self._first_process == 0:
            return []
        space = Path(f"/proc/{self._first_process}/ns/pid").readlink()
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if (process / "ns/pid").readlink() == space:
                    found.append(int(process.name))
            except OSError:
                continue  # the process has ended
        return found

    def _start_machine(self) -> None:
        self._scratch.mkdir()
        first = [*PYTHON, str(HERE / "first_process.py"), str(self._scratch), configuration.NODE_ADDRESS, "24"]
        log = self.logs / "machine.log"
        command = [str(self._scratch), *first, configuration.DNS_ADDRESS]
        self._machine = machine = GuardedProcess(command, log, env=self._environment, guard=HERE / "machine.py")
        wait_until(lambda: self._is_machine_ready(machine), f"the node's machine, log: {log}", 30)

    @property
    def _scratch(self) -> Path:
        """A folder that is removed with the machine: images, containers, and the kubelet's files."""
        return self.folder / "scratch"

    def _is_machine_ready(self, machine: GuardedProcess) -> bool:
        if machine.exit_code() is not None:
            raise NotReadyError(f"the node's machine ended; the end of {machine.log}:\n{tail(machine.log)}")
        if not (self._scratch / "ready").exists():
            return False
        self._first_process = _innermost(machine.pid)
        return True

    def _inside(self) -> list[str]:
        spaces = ["--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup"]
        return ["nsenter", f"--target={self._first_process}", *spaces, "sh", "-c", ENTER, "sh"]

    @property
    def _environment(self) -> dict[str, str]:
        return {**self.tools.environment, "HOME": str(self.folder)}

    def _ctr(self, *words: str) -> list[str]:
        address = str(configuration.socket(self._scratch))
        return [str(self.tools.program("ctr")), f"--address={address}", "--namespace=k8s.io", *words]

    def _ctr_answers(self) -> bool:
        try:
            self.run(*self._ctr("version"), timeout=10)
        except CommandFailedError:
            return False
        return True

    def _write(self, name: str, config: dict[str, Any]) -> Path:
        path = self._scratch / f"{name}.json"
        path.write_text(json.dumps(config))
        return path

    def _start_process(self, command: Sequence[str | Path], log: Path) -> GuardedProcess:
        return GuardedProcess([*self._inside(), *command], log, env=self._environment)

    def _end(self, name: str) -> None:
        """Kills its process group, because signals do not reach a program behind nsenter."""
        if process := self._processes.pop(name, None):
            process.stop()

    def _apiserver_flags(self) -> list[str]:
        pki = self._pki
        return [
            *super()._apiserver_flags(),
            "--bind-address=0.0.0.0",
            f"--advertise-address={configuration.NODE_ADDRESS}",
            "--endpoint-reconciler-type=master-count",
            f"--kubelet-client-certificate={pki.certificate('apiserver-kubelet')}",
            f"--kubelet-client-key={pki.key('apiserver-kubelet')}",
            "--kubelet-preferred-address-types=InternalIP",
            "--enable-admission-plugins=NodeRestriction",
        ]

    def _make_pki(self, folder: Path) -> Pki:
        addresses = (configuration.NODE_ADDRESS, configuration.API_SERVICE_ADDRESS)
        return Pki.make(folder, self.server, others=configuration.USERS, addresses=addresses)


def _needed(program: Path | None) -> Path:
    assert program is not None, "requirements.why_not() checks that it exists"
    return program


def _innermost(pid: int) -> int:
    """The last process in the chain of only children: machine.py, unshare, first process."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return _innermost(int(children[0])) if children else pid
