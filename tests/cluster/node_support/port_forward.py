"""`kubectl port-forward` in the background."""

import re
from pathlib import Path
from typing import Self

from cluster_support.cluster import Cluster, wait_until
from cluster_support.processes import GuardedProcess

LISTENING = re.compile(r"Forwarding from 127\.0\.0\.1:(\d+) -> ")


class PortForward:
    """A context manager: forwards a free loopback port to a port of a target such as `service/chat`."""

    def __init__(self, cluster: Cluster, namespace: str, target: str, port: int, folder: Path) -> None:
        flags = [f"--kubeconfig={cluster.kubeconfig}", "--namespace", namespace]
        self._command = [cluster.kubectl_path, *flags, "port-forward", target, f":{port}"]
        self._log = folder / f"port-forward-{target.replace('/', '-')}.log"

    def __enter__(self) -> Self:
        self._process = GuardedProcess(self._command, self._log)
        wait_until(lambda: LISTENING.search(self._log.read_text()) is not None, f"port-forward, log: {self._log}", 30)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stop()

    @property
    def url(self) -> str:
        found = LISTENING.search(self._log.read_text())
        assert found is not None
        return f"http://127.0.0.1:{found[1]}"
