"""The faults: how each is injected and removed."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster_support.cluster import wait_until
from cluster_support.errors import NotReadyError
from cluster_support.processes import tail

from chaos.site import CONTAINER, Site

RANK, COORDINATOR, FRONTEND = "megatron_runtime.rank", "coordinator_process", "server.frontend"
LAUNCHER = "megatron-serve"
COORDINATOR_PORT = 5557
IDENTITIES = Path(__file__).with_name("identities.py")
LONGEST_RECONNECTIONS = 60.0
CUT_SECONDS = 15.0
STALL_SECONDS = 20.0
LOST_SECONDS = 10.0
"""Time for which the API server considers the node lost, in seconds."""
SECONDS_AHEAD = 30.0
"""Head start of the silence before the load; after 40 s the API server considers a node lost."""
HOG = """
import pathlib, time
control, taken = pathlib.Path("/sys/fs/cgroup/memory/memory.oom_control"), []
def kills():
    return int(control.read_text().split("oom_kill ")[1])
before = kills()
while kills() == before:
    taken.append(b"x" * (16 << 20))
    time.sleep(0.02)
print(kills() - before)
"""
"""Allocates memory until the kernel kills the largest process in the container, which is the rank."""


def _nothing(_: Site) -> None:
    pass


@dataclass(frozen=True)
class Fault:
    """``inject`` returns when the fault is over.

    For slow faults, ``prepare`` runs before the load, and ``await_it`` before the measurement of time.
    """

    name: str
    words: str
    inject: Callable[[Site], None]
    prepare: Callable[[Site], None] = _nothing
    await_it: Callable[[Site], None] = _nothing


def _delete(site: Site, pod: dict[str, Any]) -> None:
    site.kubectl("delete", "pod", pod["metadata"]["name"], "--wait=false")


def _delete_worker(site: Site) -> None:
    _delete(site, site.worker())


def _delete_leader(site: Site) -> None:
    _delete(site, site.leader())


def _kill(processes: list[int]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):  # it may have ended with a process that was killed before
            os.kill(process, signal.SIGKILL)


def _kill_rank(site: Site) -> None:
    _kill(site.processes(site.worker(), RANK))


def _kill_leaders_processes(site: Site) -> None:
    """As when a machine loses its power: processes send nothing, and connections are not closed properly."""
    _kill(site.processes(site.leader()))


def _stop_for_a_while(words: str) -> Callable[[Site], None]:
    """The leader's processes with these words on their command line do not run for STALL_SECONDS."""

    def inject(site: Site) -> None:
        stopped = site.processes(site.leader(), words)
        try:
            for process in stopped:
                os.kill(process, signal.SIGSTOP)
            time.sleep(STALL_SECONDS)
        finally:
            for process in stopped:
                with contextlib.suppress(ProcessLookupError):  # it may have been replaced
                    os.kill(process, signal.SIGCONT)

    return inject


def _run_out_of_memory(site: Site) -> None:
    pod = site.worker()
    before = site.processes(pod, RANK)
    killed = site.kubectl("exec", pod["metadata"]["name"], "-c", CONTAINER, "--", "python3", "-c", HOG)
    if Path(f"/proc/{before[0]}").exists():
        raise NotReadyError(f"the kernel killed {killed.strip()} instead of the rank: change MEMORY_LIMIT")


def _go_silent(site: Site) -> None:
    site.node.stop_kubelet()
    time.sleep(SECONDS_AHEAD)


def _until_lost(site: Site) -> None:
    wait_until(lambda: not site.node.is_node_ready(), "the API server to consider the node lost", 90, every=0.3)


def _stay_lost(site: Site) -> None:
    time.sleep(LOST_SECONDS)
    site.node.start_kubelet()


def _kill_operator(site: Site) -> None:
    _kill(site.processes(site.operator(), "megatron-operator"))


def _restart_api_server(site: Site) -> None:
    site.node.restart_apiserver()


def _cut_coordinator(site: Site) -> None:
    address = site.leader()["status"]["podIP"]
    rules = [
        ["FORWARD", "-p", "tcp", side, address, port, str(COORDINATOR_PORT), "-j", "DROP"]
        for side, port in (("-d", "--dport"), ("-s", "--sport"))
    ]
    try:
        for rule in rules:
            site.node.run("iptables", "-I", *rule)
        time.sleep(CUT_SECONDS)
    finally:
        for rule in rules:
            site.node.run("iptables", "-D", *rule)


def _reuse_identities(site: Site) -> None:
    secret = json.loads(site.kubectl("get", "secret", f"{site.name}-keys", "-o", "json"))
    key = base64.b64decode(secret["data"]["coordinator-key"]).decode()
    address = f"tcp://{site.leader()['status']['podIP']}:{COORDINATOR_PORT}"
    words = [sys.executable, IDENTITIES, address, key]
    process = site.node.start_program(words, site.node.logs / "identities.log")
    try:
        if process.wait(LONGEST_RECONNECTIONS):
            raise NotReadyError(f"the reconnections failed:\n{tail(process.log)}")
    finally:
        process.stop()


FAULTS = (
    Fault("worker", "`kubectl delete pod` of a worker", _delete_worker),
    Fault("leader", "`kubectl delete pod` of the leader", _delete_leader),
    Fault("leader-lost", "SIGKILL of all processes of the leader pod", _kill_leaders_processes),
    Fault("rank", "SIGKILL of a rank", _kill_rank),
    Fault("rank-stall", f"a rank stopped for {STALL_SECONDS:.0f} s", _stop_for_a_while(RANK)),
    Fault("coordinator-stall", f"the coordinator stopped for {STALL_SECONDS:.0f} s", _stop_for_a_while(COORDINATOR)),
    Fault("frontend-stall", f"a frontend stopped for {STALL_SECONDS:.0f} s", _stop_for_a_while(FRONTEND)),
    Fault("launcher-stall", f"the launcher stopped for {STALL_SECONDS:.0f} s", _stop_for_a_while(LAUNCHER)),
    Fault("identities", "connections that reuse the identity of another one", _reuse_identities),
    Fault("memory", "a rank killed by the kernel at the pod's memory limit", _run_out_of_memory),
    Fault("node", f"the node NotReady for {LOST_SECONDS:.0f} s (kubelet ended)", _stay_lost, _go_silent, _until_lost),
    Fault("operator", "SIGKILL of the operator", _kill_operator),
    Fault("api-server", "kube-apiserver restarted", _restart_api_server),
    Fault("link", f"the coordinator disconnected by iptables for {CUT_SECONDS:.0f} s", _cut_coordinator),
)
NAMES = tuple(fault.name for fault in FAULTS)
UNDISTURBED = Fault("none", "nothing", _nothing)
