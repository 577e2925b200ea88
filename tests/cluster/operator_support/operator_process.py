"""The operator as a process with the permissions of its ServiceAccount."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx
from cluster_support.cluster import wait_until
from cluster_support.control_plane import free_ports
from cluster_support.processes import GuardedProcess, tail

GRACE = 15.0


class OperatorProcess:
    """``start`` returns when it is alive. Restarts append to the log."""

    def __init__(
        self,
        kubeconfig: Path,
        log: Path,
        *,
        namespaces: Sequence[str] = (),
        with_kopf: bool = False,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        """``settings``: additional environment variables of the operator."""
        self._settings = dict(settings or {})
        self._kubeconfig = kubeconfig
        self._namespaces = namespaces
        self._with_kopf = with_kopf
        self._process: GuardedProcess | None = None
        # One client, because a new one reads all certificates, for 25 ms of processor time. It keeps no connection, for
        # which the operator would wait at its end.
        self._http = httpx.Client(trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))
        self.log = log
        self.port = free_ports(1)[0]

    @property
    def pid(self) -> int:
        """Process id of its guard. Raises AssertionError if it does not run."""
        assert self._process is not None
        return self._process.pid

    @property
    def url(self) -> str:
        """URL of its metrics and health."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._process = GuardedProcess(self._command(), self.log, env=self._environment())
        wait_until(self._is_alive, f"the operator, log: {self.log}", timeout=60)

    def ensure_started(self) -> None:
        """Starts it unless it runs."""
        if self._process is None:
            self.start()

    def stop(self) -> int | None:
        """Sends SIGTERM, as a kubelet does. Returns the exit code; None if it did not run."""
        if self._process is None:
            return None
        process, self._process = self._process, None
        process.stop(GRACE)
        return process.exit_code()

    def kill(self) -> None:
        """Sends SIGKILL."""
        assert self._process is not None
        process, self._process = self._process, None
        process.stop()

    def halt(self) -> None:
        """Stops the process, like a frozen machine, until `go_on`."""
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGCONT)

    def metric(self, series: str) -> float:
        """The value of one series, given with its labels."""
        line = next(line for line in self.metrics().splitlines() if line.startswith(f"{series} "))
        return float(line.split()[-1])

    def metrics(self) -> str:
        return self._http.get(f"{self.url}/metrics").text

    def _command(self) -> list[str]:
        if self._with_kopf:
            return [sys.executable, "-m", "kopf", "run", "--all-namespaces", "-m", "megatron_operator.handlers"]
        flags = [f"--namespace={namespace}" for namespace in self._namespaces]
        port = ["--metrics-host=127.0.0.1", f"--metrics-port={self.port}"]
        return [sys.executable, "-m", "megatron_operator.cli", "run", *port, *flags]

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("MEGATRON_", "KUBERNETES_"))}
        return {
            **kept,
            **self._settings,
            "KUBECONFIG": str(self._kubeconfig),
            "NO_PROXY": "127.0.0.1",
            "PYTHONUNBUFFERED": "1",
            "MEGATRON_OPERATOR_METRICS_HOST": "127.0.0.1",
            "MEGATRON_OPERATOR_METRICS_PORT": str(self.port),
        }

    def _is_alive(self) -> bool:
        assert self._process is not None
        if (code := self._process.exit_code()) is not None:
            raise AssertionError(f"the operator ended with exit status {code}:\n{tail(self.log, 40)}")
        return self.is_healthy()

    def is_healthy(self) -> bool:
        """The result of a liveness probe."""
        try:
            return self._http.get(f"{self.url}/healthz").is_success
        except httpx.HTTPError:
            return False


@contextlib.contextmanager
def in_the_place_of(operator: OperatorProcess, other: OperatorProcess) -> Iterator[None]:
    """Replaces the operator by another one, because two would serve the same resources.

    The next test that needs the operator starts it again.
    """
    operator.stop()
    try:
        other.start()
        yield
    finally:
        other.stop()
