"""Costs of the operator with many resources, on a real etcd and API server.

For each size, in a separate namespace, the program creates this number of resources at once. Simulated pods run as soon
as they are created, without a model. The results are the times until the first pod of a resource and until all
resources are ready, the operator's requests to the API server meanwhile, and its requests and CPU time while nothing
changes. A second table has the same for resources whose pods get no node, and the time of another resource beside them.
Times depend on the machine, which etcd, the API server and the simulated pods share; counts do not.

    python benchmarks/fleet.py
    python benchmarks/fleet.py --resources 1 --resources 50 --idle-seconds 20

(The name operator.py would shadow a module of the standard library for all programs in this folder.)
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import yaml
from kubernetes.aio import client, config

from peers.command_line import positive, print_table

ROOT = Path(__file__).parent.parent
MANIFESTS = ROOT / "manifests"
# The support modules of the tests provide a control plane and an operator.
sys.path.append(str(ROOT / "tests" / "cluster"))

from cluster_support import audit, binaries  # noqa: E402
from cluster_support.control_plane import ControlPlane  # noqa: E402
from cluster_support.progress import say_at_once  # noqa: E402
from operator_support.api import Api  # noqa: E402
from operator_support.operator_process import OperatorProcess  # noqa: E402
from operator_support.resource import manifest  # noqa: E402

from fleets.simulated_pods import SimulatedPods  # noqa: E402

SYSTEM, ACCOUNT = "megatron-system", "megatron-operator"
SIZES = (1, 50, 100, 250, 500)
AT_A_TIME = 32
"""Concurrent requests that create resources."""
LONGEST_WAIT = 600.0
"""Maximum time until all resources of one size are ready, in seconds."""
REST_SECONDS, LONGEST_REST = 3, 60
"""Seconds without a request after which a change is complete, and the maximum time to wait for that."""
TICKS = os.sysconf("SC_CLK_TCK")
COLUMNS = [
    "resources",
    "to first pod, s: p50",
    "p99",
    "all ready, s",
    "API calls per resource",
    "rounds per resource",
    "calls per round",
    "operator, MiB",
    "CPU per resource, ms",
    "idle: calls/min",
    "idle: CPU, %",
]


WAITING_SIZES = (100, 500)
WAITING_COLUMNS = [
    "waiting for nodes",
    "API calls per resource",
    "idle: calls/min",
    "idle: CPU, %",
    "another resource ready, s: alone",
    "beside them",
]


@dataclass(frozen=True)
class Usage:
    """Resource usage of the operator since its start; ``seconds`` is CPU time."""

    calls: int
    rounds: int
    seconds: float

    def since(self, before: Usage) -> Usage:
        """The difference."""
        return Usage(self.calls - before.calls, self.rounds - before.rounds, self.seconds - before.seconds)


@dataclass(frozen=True)
class SizeResult:
    """Results for one size. ``to_first_pod`` has the seconds for each resource."""

    to_first_pod: list[float]
    ready_seconds: float
    starting: Usage
    idle: Usage
    idle_seconds: float
    resident_bytes: int

    def row(self) -> list[str]:
        """The cells of the row, for ``COLUMNS``."""
        size, calls, rounds = len(self.to_first_pod), self.starting.calls, self.starting.rounds
        return [
            str(size),
            f"{statistics.median(self.to_first_pod):.2f}",
            f"{sorted(self.to_first_pod)[min(size - 1, int(size * 0.99))]:.2f}",
            f"{self.ready_seconds:.1f}",
            f"{calls / size:.1f}",
            f"{rounds / size:.1f}",
            f"{calls / max(rounds, 1):.1f}",
            f"{self.resident_bytes / 2**20:.0f}",
            f"{self.starting.seconds / size * 1000:.0f}",
            f"{self.idle.calls / self.idle_seconds * 60:.1f}",
            f"{self.idle.seconds / self.idle_seconds * 100:.1f}",
        ]


class Operator:
    """The operator's process."""

    def __init__(self, process: OperatorProcess, logs: Path) -> None:
        self._process = process
        self._logs = logs

    def usage(self) -> Usage:
        """The usage so far."""
        calls = sum(1 for _ in audit.requests_of(self._logs, ACCOUNT, SYSTEM))
        rounds = re.findall(r"^megatron_operator_reconciles_total\{.*\} ([0-9.e+]+)$", self._process.metrics(), re.M)
        fields = Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()
        return Usage(calls, int(sum(map(float, rounds))), (int(fields[11]) + int(fields[12])) / TICKS)

    def resident_bytes(self) -> int:
        """Its current memory."""
        status = Path(f"/proc/{self._pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) * 1024

    @property
    def _pid(self) -> int:
        """The operator is a child of the guard process that ends it with this program."""
        guard = self._process.pid
        return int(Path(f"/proc/{guard}/task/{guard}/children").read_text().split()[0])


async def measure(size: int, api: Api, pods: client.CoreV1Api, operator: Operator, idle_seconds: float) -> SizeResult:
    """Creates ``size`` resources, waits until all are ready, measures while nothing changes, and deletes them."""
    namespace = f"fleet-{size}-{secrets.token_hex(3)}"
    await api.post("/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
    path = f"/apis/inference.megatron.dev/v1alpha1/namespaces/{namespace}/megatroninferences"
    async with SimulatedPods(api, pods, namespace) as simulated:
        before, began = operator.usage(), time.perf_counter()
        created = await _create_all(api, path, [f"model-{number}" for number in range(size)])
        await _until(lambda: _are_ready(api, path, size), LONGEST_WAIT)
        ready_seconds = time.perf_counter() - began
        starting = operator.usage().since(before)
        before = await _rested(operator) if idle_seconds else operator.usage()
        await asyncio.sleep(idle_seconds)
        idle, resident_bytes = operator.usage().since(before), operator.resident_bytes()
        to_first_pod = [simulated.first_seen[name] - at for name, at in created.items()]
        await api.delete(f"/api/v1/namespaces/{namespace}")
        await _until(lambda: _is_empty(api, path), LONGEST_WAIT)
    return SizeResult(to_first_pod, ready_seconds, starting, idle, idle_seconds, resident_bytes)


async def measure_waiting(
    size: int, api: Api, pods: client.CoreV1Api, operator: Operator, idle_seconds: float
) -> list[str]:
    """Creates ``size`` resources whose pods get no node, measures, and creates one more whose pod runs."""
    alone = await measure(1, api, pods, operator, 0)
    namespace = f"waiting-{size}-{secrets.token_hex(3)}"
    await api.post("/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
    path = f"/apis/inference.megatron.dev/v1alpha1/namespaces/{namespace}/megatroninferences"
    before = operator.usage()
    await _create_all(api, path, [f"model-{number}" for number in range(size)])
    await _until(lambda: _have_pods(api, path, size), LONGEST_WAIT)
    rested = await _rested(operator)
    await asyncio.sleep(idle_seconds)
    idle = operator.usage().since(rested)
    beside = await measure(1, api, pods, operator, 0)
    await api.delete(f"/api/v1/namespaces/{namespace}")
    await _until(lambda: _is_empty(api, path), LONGEST_WAIT)
    return [
        str(size),
        f"{rested.since(before).calls / size:.1f}",
        f"{idle.calls / idle_seconds * 60:.1f}",
        f"{idle.seconds / idle_seconds * 100:.1f}",
        f"{alone.ready_seconds:.2f}",
        f"{beside.ready_seconds:.2f}",
    ]


async def _create_all(api: Api, path: str, names: list[str]) -> dict[str, float]:
    """The creation time of each."""
    created: dict[str, float] = {}
    slots = asyncio.Semaphore(AT_A_TIME)

    async def create(name: str) -> None:
        async with slots:
            created[name] = time.perf_counter()
            await api.post(path, manifest(name))

    await asyncio.gather(*map(create, names))
    return created


async def _rested(operator: Operator) -> Usage:
    """The usage when the operator has finished all work for the last change."""
    usage = operator.usage()
    for _ in range(LONGEST_REST // REST_SECONDS):
        await asyncio.sleep(REST_SECONDS)
        before, usage = usage, operator.usage()
        if usage.calls == before.calls:
            break
    return usage


async def _are_ready(api: Api, path: str, size: int) -> bool:
    statuses = [each.get("status") or {} for each in await api.items(path)]
    return sum(status.get("phase") == "Running" for status in statuses) == size


async def _have_pods(api: Api, path: str, size: int) -> bool:
    statuses = [each.get("status") or {} for each in await api.items(path)]
    return sum(status.get("replicas") == 1 for status in statuses) == size


async def _is_empty(api: Api, path: str) -> bool:
    return not await api.items(path)


async def _until(is_so: Callable[[], Awaitable[bool]], seconds: float) -> None:
    async with asyncio.timeout(seconds):
        while not await is_so():  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.5)


async def run(plane: ControlPlane, operator: Operator, chosen: argparse.Namespace) -> None:
    """Measures and prints all sizes."""
    configuration = client.Configuration()
    kubeconfig = str(plane.kubeconfig)
    await config.load_kube_config(kubeconfig, client_configuration=configuration, persist_config=False)
    rows = [COLUMNS]
    async with Api(plane.kubeconfig) as api, client.ApiClient(configuration) as connection:
        pods = client.CoreV1Api(connection)
        await measure(1, api, pods, operator, 0)  # ensures that the operator watches
        for size in chosen.resources or SIZES:
            print(f"{size} resources ...", file=sys.stderr, flush=True)
            rows.append((await measure(size, api, pods, operator, chosen.idle_seconds)).row())
        print_table(rows)
        rows = [WAITING_COLUMNS]
        for size in chosen.waiting or WAITING_SIZES:
            print(f"{size} resources without nodes ...", file=sys.stderr, flush=True)
            rows.append(await measure_waiting(size, api, pods, operator, chosen.idle_seconds))
    print_table(rows)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--resources", type=positive, action="append", help="repeatable; default: 1 to 500")
    parser.add_argument("--waiting", type=positive, action="append", help="resources without nodes; default: 100, 500")
    parser.add_argument(
        "--idle-seconds", type=positive, default=60, help="duration of the measurement without changes; default: 60"
    )
    chosen = parser.parse_args()
    source = binaries.find(os.environ, say_at_once)
    if isinstance(source, binaries.ExternalCluster):
        parser.error(f"needs its own control plane, to read its audit log; {source} is set: unset it")
    kubectl = binaries.find_kubectl(os.environ)
    with tempfile.TemporaryDirectory() as folder, ControlPlane(source, kubectl, Path(folder)) as plane:
        plane.define(yaml.safe_load((MANIFESTS / "crd.yaml").read_text()))
        for name in ("namespace.yaml", "rbac.yaml"):
            plane.kubectl("apply", "-f", str(MANIFESTS / name))
        process = OperatorProcess(plane.kubeconfig_for(ACCOUNT, SYSTEM), Path(folder, "operator.log"))
        process.start()
        try:
            asyncio.run(run(plane, Operator(process, plane.logs), chosen))
        finally:
            process.stop()


if __name__ == "__main__":
    main()
