"""A control plane for the tests: etcd, the API server and the controllers, on loopback.

The API server that the tests build consists of two: the core, and a newer server for custom resources, to which the
core's aggregator proxies requests for them. Clients see one server.
"""

import functools
import http.client
import itertools
import os
import random
import shutil
import socket
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from cluster_support import audit
from cluster_support.binaries import Binaries
from cluster_support.cluster import Cluster, wait_until
from cluster_support.errors import NotReadyError
from cluster_support.pki import FRONT_PROXY, Pki
from cluster_support.processes import GuardedProcess, tail

GRACE = 2.0  # seconds; the API server would wait a minute for watchers
SERVICE_ADDRESSES = "10.96.0.0/16"
FIRST_PORT, PORTS_PER_WORKER, MOST_WORKERS = 20000, 600, 16
UNUSED_ADDRESS = "192.0.2.1"  # from a block that is reserved for documentation


def free_ports(count: int) -> list[int]:
    """Different free ports on loopback.

    They are below the range for outgoing connections: there, a client that retries a stopped server could get the
    server's port, or even connect to itself. Each worker of pytest-xdist has its own range, because a server binds its
    port some time after the check.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % MOST_WORKERS
    first = FIRST_PORT + worker * PORTS_PER_WORKER
    candidates = random.sample(range(first, first + PORTS_PER_WORKER), PORTS_PER_WORKER)
    return list(itertools.islice(filter(_is_free, candidates), count))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


class ControlPlane(Cluster):
    """A context manager. `folder` must be empty; it gets logs/, pki/ and, while it runs, etcd's data."""

    def __init__(self, binaries: Binaries, kubectl: Path, folder: Path, *, with_scheduler: bool = False) -> None:
        etcd_port, self._etcd_peer_port, self._port, self._custom_resources_port = free_ports(4)
        self._etcd_url = f"http://127.0.0.1:{etcd_port}"
        self._binaries = binaries
        self._with_scheduler = with_scheduler
        self._processes: dict[str, GuardedProcess] = {}
        self.logs = folder / "logs"
        self.logs.mkdir()
        self.server = f"https://127.0.0.1:{self._port}"
        self._pki = self._make_pki(folder / "pki")
        super().__init__(self._pki.kubeconfig("admin"), kubectl, folder, binaries)

    @property
    def binaries(self) -> Binaries:
        """The programs that it runs."""
        return self._binaries

    @property
    def has_controllers(self) -> bool:
        return self._binaries.controller_manager is not None

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Returns when requests are answered. Raises NotReadyError with the end of the log."""
        self.start_etcd()
        self.start_apiserver()
        self.start_controllers()

    def stop(self) -> None:
        """Kills all processes and deletes the data; the logs stay."""
        for name in reversed(list(self._processes)):
            self._processes.pop(name).stop()
        shutil.rmtree(self._data, ignore_errors=True)

    def pids(self) -> dict[str, int]:
        """Process ids of the guards, which lead the process groups of their programs."""
        return {name: process.pid for name, process in self._processes.items()}

    def start_etcd(self) -> None:
        peer = f"http://127.0.0.1:{self._etcd_peer_port}"
        self._launch(
            "etcd",
            self._binaries.etcd,
            f"--data-dir={self._data}",
            f"--listen-client-urls={self._etcd_url}",
            f"--advertise-client-urls={self._etcd_url}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            # Supported by the etcd of the tests; the data is deleted after the tests.
            *(["--unsafe-no-fsync"] if self._binaries.apiextensions else []),
        )

    def stop_etcd(self) -> None:
        """Stops etcd; the API server then answers with errors or not at all."""
        self._end("etcd")

    def start_apiserver(self) -> None:
        """Starts the API server, always on the same port; returns when it is ready."""
        if self._binaries.apiextensions is None:
            self._launch("kube-apiserver", self._binaries.apiserver, *self._apiserver_flags())
        else:
            self._launch("apiextensions-apiserver", self._binaries.apiextensions, *self._apiextensions_flags())
            second = f"CUSTOM_RESOURCES_PORT={self._custom_resources_port}"
            words = [second, str(self._binaries.apiserver), *self._apiserver_flags(), *self._aggregator_flags()]
            self._launch("kube-apiserver", Path("/usr/bin/env"), *words)
        self.wait_until_ready()

    def stop_apiserver(self) -> None:
        self._end("kube-apiserver")
        self._end("apiextensions-apiserver")

    def restart_apiserver(self) -> None:
        self.stop_apiserver()
        self.start_apiserver()

    def start_controllers(self) -> None:
        """Starts the controllers, and the scheduler if requested; nothing if their programs are missing."""
        if self._binaries.controller_manager:
            self._launch(
                "kube-controller-manager",
                self._binaries.controller_manager,
                *self._controller_flags("controller-manager"),
                f"--service-account-private-key-file={self._pki.key('service-account')}",
                f"--root-ca-file={self._pki.certificate('ca')}",
                "--use-service-account-credentials",
            )
        if self._with_scheduler:
            if self._binaries.scheduler is None:
                raise NotReadyError(f"there is no kube-scheduler beside {self._binaries.apiserver}")
            self._launch("kube-scheduler", self._binaries.scheduler, *self._controller_flags("scheduler"))

    def stop_controllers(self) -> None:
        self._end("kube-scheduler")
        self._end("kube-controller-manager")

    def define(self, *definitions: dict[str, Any]) -> None:
        """Restarts the controllers, because the garbage collector detects new kinds at its start or every 30 s."""
        super().define(*definitions)
        self.stop_controllers()
        self.start_controllers()

    def wait_until_ready(self, timeout: float = 60.0) -> None:
        wait_until(self._is_ready_or_dead, f"the API server at {self.server}, log: {self.logs}", timeout)

    def is_ready(self) -> bool:
        """The result of the API server's readiness check, including etcd, and whether it serves CRDs."""
        return self._answers("/readyz") and self._answers("/apis/apiextensions.k8s.io/v1")

    def custom_resources(self, path: str) -> str:
        """The response of the server for custom resources: an older core does not publish OpenAPI v3."""
        return self.kubectl("get", "--raw", path, kubeconfig=self.custom_resources_kubeconfig)

    @functools.cached_property
    def custom_resources_kubeconfig(self) -> Path:
        if self._binaries.apiextensions is None:
            return super().custom_resources_kubeconfig
        server, path = f"https://127.0.0.1:{self._custom_resources_port}", self.folder / "custom-resources.kubeconfig"
        return self._pki.write_kubeconfig("admin", server, path)

    def _answers(self, path: str) -> bool:
        context = ssl.create_default_context(cafile=self._pki.certificate("ca"))
        context.load_cert_chain(self._pki.certificate("admin"), self._pki.key("admin"))
        connection = http.client.HTTPSConnection("127.0.0.1", self._port, context=context, timeout=5)
        try:
            connection.request("GET", path)
            return connection.getresponse().status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    @property
    def _data(self) -> Path:
        return self.folder / "etcd"

    def _is_ready_or_dead(self) -> bool:
        for name, process in self._processes.items():
            if (code := process.exit_code()) is not None:
                raise NotReadyError(
                    f"{name} ended with exit status {code}; the end of {process.log}:\n{tail(process.log)}"
                )
        return self.is_ready()

    def _make_pki(self, folder: Path) -> Pki:
        return Pki.make(folder, self.server)

    def _launch(self, name: str, program: Path, *flags: str) -> None:
        if name in self._processes:
            raise NotReadyError(f"{name} runs already: stop it before starting it again")
        self._processes[name] = self._start_process([program, *flags], self.logs / f"{name}.log")

    def _start_process(self, command: Sequence[str | Path], log: Path) -> GuardedProcess:
        return GuardedProcess(command, log)

    def _end(self, name: str) -> None:
        if process := self._processes.pop(name, None):
            process.stop(GRACE)

    def _apiserver_flags(self) -> list[str]:
        pki = self._pki
        flags = [
            f"--etcd-servers={self._etcd_url}",
            "--bind-address=127.0.0.1",
            f"--secure-port={self._port}",
            # A loopback address is refused, and the default needs an external route.
            f"--advertise-address={UNUSED_ADDRESS}",
            "--endpoint-reconciler-type=none",
            f"--tls-cert-file={pki.certificate('apiserver')}",
            f"--tls-private-key-file={pki.key('apiserver')}",
            f"--client-ca-file={pki.certificate('ca')}",
            "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
            f"--service-account-signing-key-file={pki.key('service-account')}",
            f"--service-account-key-file={pki.key('service-account')}",
            f"--service-cluster-ip-range={SERVICE_ADDRESSES}",
            "--authorization-mode=Node,RBAC",
            "--allow-privileged=true",
            *audit.flags(self.logs),
        ]
        if not self.has_controllers:
            # Without controllers, ServiceAccounts are missing, and this plugin would refuse all pods.
            flags.append("--disable-admission-plugins=ServiceAccount")
        return flags

    def _apiextensions_flags(self) -> list[str]:
        """It delegates authorization to the core with the administrator's kubeconfig."""
        pki = self._pki
        kubeconfigs = ("kubeconfig", "authentication-kubeconfig", "authorization-kubeconfig")
        return [
            f"--etcd-servers={self._etcd_url}",
            "--etcd-prefix=/registry",
            "--bind-address=127.0.0.1",
            f"--secure-port={self._custom_resources_port}",
            f"--tls-cert-file={pki.certificate('apiserver')}",
            f"--tls-private-key-file={pki.key('apiserver')}",
            f"--client-ca-file={pki.certificate('ca')}",
            *self._front_proxy_flags(),
            *(f"--{name}={pki.kubeconfig('admin')}" for name in kubeconfigs),
            "--authentication-skip-lookup",
            # Both watch kinds that the core does not have.
            "--enable-priority-and-fairness=false",
            "--disable-admission-plugins=ValidatingAdmissionPolicy,MutatingAdmissionPolicy",
        ]

    def _aggregator_flags(self) -> list[str]:
        pki = self._pki
        return [
            *self._front_proxy_flags(),
            f"--proxy-client-cert-file={pki.certificate(FRONT_PROXY)}",
            f"--proxy-client-key-file={pki.key(FRONT_PROXY)}",
            "--runtime-config=" + ",".join(f"{api}={served}" for api, served in self._apis().items()),
            # Its configuration is beta. Without it there are the limits of requests in flight.
            "--enable-priority-and-fairness=false",
        ]

    def _apis(self) -> dict[str, str]:
        """Whether the core serves an API. Beta versions that no test uses would take a third of each of its starts."""
        used = ("policy/v1beta1", "discovery.k8s.io/v1beta1")
        return {"api/beta": "false", **dict.fromkeys(used, "true")}

    def _front_proxy_flags(self) -> list[str]:
        """The trusted proxy for user information, and its headers."""
        return [
            f"--requestheader-client-ca-file={self._pki.certificate('ca')}",
            f"--requestheader-allowed-names={FRONT_PROXY}",
            "--requestheader-username-headers=X-Remote-User",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        ]

    def _controller_flags(self, user: str) -> list[str]:
        flags = [f"--kubeconfig={self._pki.kubeconfig(user)}", "--leader-elect=false", "--secure-port=0"]
        # Up to 1.23 there is a second, insecure port with a fixed number, which would conflict between control planes.
        return [*flags, "--port=0"] if self._binaries.minor < 24 else flags
