"""The cluster of one node with the chart and the sample, and access to its parts for the faults."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from chart_support.helm import NAMESPACE
from cluster_support.cluster import wait_until
from cluster_support.errors import CommandFailedError, NotReadyError
from cluster_support.processes import GuardedProcess
from node_support.node import Node
from node_support.stage import OPERATOR_SELECTOR

ROOT = Path(__file__).parents[2]
SAMPLE = ROOT / "manifests/samples/smollm2.yaml"
LOAD = Path(__file__).with_name("load.py")
LABEL = "inference.megatron.dev"
CONTAINER = "megatron"
MEMORY_LIMIT = "2Gi"
"""Memory limit of each pod: more than the pod needs, but low enough for a program to exceed it."""
LONGEST_START = 300.0
HTTP_PORT = 8000


class Site:
    """``namespace`` contains only the resource."""

    def __init__(self, node: Node, namespace: str, replicas: int) -> None:
        self.node = node
        self.namespace = namespace
        self.replicas = replicas
        self.name = "smollm2"

    def serve(self) -> None:
        """Applies the sample with a memory limit; returns when all replica groups are ready."""
        resource = yaml.safe_load(SAMPLE.read_text())
        limited = {"name": CONTAINER, "resources": {"limits": {"memory": MEMORY_LIMIT}}}
        resource["spec"] |= {"replicas": self.replicas, "podTemplate": {"spec": {"containers": [limited]}}}
        # The repeated faults must not exhaust the restart budget.
        resource["spec"]["failurePolicy"] = {"maxRestarts": 20}
        self.kubectl("apply", "--validate=false", "-f", "-", input=json.dumps(resource))
        wait_until(self._is_running, "the sample to run", LONGEST_START, every=0.5)

    def kubectl(self, *words: str, input: str | None = None) -> str:
        """Runs kubectl in the resource's namespace. Raises CommandFailedError."""
        return self.node.kubectl("-n", self.namespace, *words, input=input)

    def status(self) -> dict[str, Any]:
        """The status of the resource."""
        status: dict[str, Any] = self.node.get("mi", self.name, "-n", self.namespace).get("status") or {}
        return status

    def pods(self) -> list[dict[str, Any]]:
        """The pods that run and are not being deleted, the leader first."""
        found = self.node.get("pods", "-n", self.namespace, "-l", f"{LABEL}/name={self.name}")["items"]
        stay = [pod for pod in found if pod["status"].get("phase") == "Running"]
        stay = [pod for pod in stay if "deletionTimestamp" not in pod["metadata"]]
        return sorted(stay, key=lambda pod: pod["metadata"]["labels"][f"{LABEL}/role"] != "leader")

    def leader(self) -> dict[str, Any]:
        """Its pod."""
        return self.pods()[0]

    def worker(self) -> dict[str, Any]:
        """A pod that is not the leader."""
        return self.pods()[-1]

    def processes(self, pod: dict[str, Any], words: str = "") -> list[int]:
        """The process ids, on the machine, of the pod's processes whose command line contains the words.

        Raises NotReadyError if there are none.
        """
        uid = pod["metadata"]["uid"]
        found = [int(each.name) for each in Path("/proc").glob("[0-9]*") if _is_like(each, uid, words)]
        if not found:
            raise NotReadyError(f"no process {words} is in pod {pod['metadata']['name']}")
        return found

    def operator(self) -> dict[str, Any]:
        """Its pod."""
        found = self.node.get("pods", "-n", NAMESPACE, "-l", OPERATOR_SELECTOR)["items"]
        return dict(found[0])

    @contextmanager
    def load(self, out: Path, requests: int, every: float) -> Iterator[GuardedProcess]:
        """The load's process in the node's network; it is ended with the context if it still runs."""
        url = f"http://{self._service_address()}:{HTTP_PORT}/v1"
        words = [sys.executable, LOAD, url, out, str(requests), str(every)]
        process = self.node.start_program(words, out.with_suffix(".log"))
        try:
            yield process
        finally:
            process.stop()

    def _service_address(self) -> str:
        return str(self.node.get("service", self.name, "-n", self.namespace)["spec"]["clusterIP"])

    def _is_running(self) -> bool:
        try:
            status = self.status()
        except CommandFailedError:
            return False
        return status.get("phase") == "Running" and status.get("ready") == f"{self.replicas}/{self.replicas}"


def _is_like(process: Path, uid: str, words: str) -> bool:
    try:
        command = (process / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
        return words in command and uid in (process / "cgroup").read_text()
    except OSError:
        return False  # the process has ended
