"""One pod as a process group: started, probed and ended, without leftovers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from megatron_operator.local import die_with_parent
from megatron_operator.local.pod_manifest import Launch, PodMetadata, named_ports
from megatron_operator.local.pod_status import PodStatus
from megatron_operator.local.probe import Probe, wait_until_started, wait_until_unhealthy, watch_readiness
from megatron_operator.local.processes import group_is_alive
from megatron_operator.observed_state import PodPhase

LONGEST_MESSAGE = 4096
"""Bytes of a termination message that the kubelet keeps."""
TAIL_LINES = 20
SECONDS_TO_VANISH = 5.0
TERMINATION_LOG = "termination-log"
"""Name of the file with the container's termination message, in the pod's folder."""


class ProcessPod:
    """One pod. ``run`` runs it to its end; the other methods control it meanwhile."""

    def __init__(
        self,
        identity: PodMetadata,
        container: Mapping[str, Any],
        launch: Launch,
        address: str,
        folder: Path,
        client: httpx.AsyncClient,
        on_change: Callable[[], None],
    ) -> None:
        self.identity = identity
        self.named_ports = named_ports(container)
        self._launch = launch
        self._client = client
        self._on_change = on_change
        self._probes = {kind: Probe.of(container, f"{kind}Probe") for kind in ("startup", "readiness", "liveness")}
        self._termination_log = folder / TERMINATION_LOG
        self._process: asyncio.subprocess.Process | None = None
        self._unhealthy = ""
        self._timers: list[asyncio.TimerHandle] = []
        self._status = PodStatus(
            name=identity.name,
            namespace=identity.namespace,
            uid=identity.uid,
            labels=identity.labels,
            annotations=identity.annotations,
            phase=PodPhase.PENDING,
            ready=False,
            address=address,
            created_at=time.time(),
            log=folder / "log",
        )

    def status(self) -> PodStatus:
        """The current status."""
        return self._status

    async def run(self) -> None:
        """Start the process, probe it, and return when it and its children are gone."""
        try:
            self._process = await self._spawn()
        except OSError as error:
            message = f"{self._launch.argv[0]}: {error.strerror or error}"
            self._update(phase=PodPhase.FAILED, reason="StartError", message=message, finished_at=time.time())
            return
        self._update(phase=PodPhase.RUNNING, started_at=time.time(), pid=self._process.pid)
        if self._status.deleting:  # the deletion was requested while it started
            self._process.terminate()
        health = asyncio.create_task(self._watch_health(), name=f"probes of {self.identity.name}")
        try:
            code = await self._process.wait()
        finally:
            health.cancel()
            for timer in self._timers:
                timer.cancel()
            self.kill()
        await self._group_gone()
        self._settle(128 - code if code < 0 else code)

    def relabel(self, labels: Mapping[str, str], annotations: Mapping[str, str]) -> None:
        """Set labels and annotations; others stay."""
        self._update(labels={**self._status.labels, **labels}, annotations={**self._status.annotations, **annotations})

    def end(self, grace_seconds: float) -> None:
        """Terminate the process, and kill it after the grace period. A later call may shorten the period."""
        if self._status.finished:
            return
        deadline = time.time() + grace_seconds
        self._update(ready=False, deletion_deadline=min(deadline, self._status.deletion_deadline or deadline))
        self._terminate(grace_seconds)

    def kill(self) -> None:
        """Kill the process group. A missing group is fine."""
        # The id of a group that is gone may be that of another one.
        if self._process is not None and not self._status.finished:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _update(self, **changes: Any) -> None:
        if changes.get("ready", self._status.ready) != self._status.ready:
            changes["ready_changed_at"] = time.time()
        updated = replace(self._status, **changes)
        if updated != self._status:
            self._status = updated
            self._on_change()

    async def _spawn(self) -> asyncio.subprocess.Process:
        # -I and -S: die_with_parent uses the standard library only, and starts in a third of the time.
        command = [sys.executable, "-I", "-S", die_with_parent.__file__, str(os.getpid()), *self._launch.argv]
        with self._status.log.open("ab") as output:
            return await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self._launch.cwd,
                env=dict(self._launch.env),
                start_new_session=True,
            )

    async def _ask(self, probe: Probe) -> bool:
        return await probe.passes(self._client, self._status.address)

    async def _watch_health(self) -> None:
        startup, readiness, liveness = (self._probes[kind] for kind in ("startup", "readiness", "liveness"))
        if startup is not None and not await wait_until_started(startup, lambda: self._ask(startup)):
            self._give_up(
                f"not started after {startup.patience:g} s: {startup.path} on port {startup.port} never answered"
            )
            return
        if readiness is None:
            self._tell_ready(True)
        async with asyncio.TaskGroup() as watchers:
            if readiness is not None:
                watchers.create_task(watch_readiness(readiness, lambda: self._ask(readiness), self._tell_ready))
            if liveness is not None:
                watchers.create_task(self._kill_when_dead(liveness))

    def _tell_ready(self, ready: bool) -> None:
        self._update(ready=ready and not self._status.deleting)

    async def _kill_when_dead(self, probe: Probe) -> None:
        await wait_until_unhealthy(probe, lambda: self._ask(probe))
        self._give_up(f"no answer from {probe.path} on port {probe.port} for {probe.patience:g} s")

    def _give_up(self, why: str) -> None:
        if self._status.deleting or self._process is None:
            return
        self._unhealthy = why
        self._update(ready=False)
        self._terminate(self.identity.grace_seconds)

    def _terminate(self, grace_seconds: float) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()
        self._timers.append(asyncio.get_running_loop().call_later(grace_seconds, self.kill))

    async def _group_gone(self) -> None:
        """Wait, for a limited time, until the killed children are gone, so that their ports are free."""
        assert self._process is not None
        deadline = time.monotonic() + SECONDS_TO_VANISH
        while time.monotonic() < deadline:
            if not group_is_alive(self._process.pid):
                return
            await asyncio.sleep(0.02)

    def _settle(self, exit_code: int) -> None:
        good = exit_code == 0 and not self._unhealthy
        reason = "Completed" if good else "Unhealthy" if self._unhealthy else "Error"
        self._update(
            phase=PodPhase.SUCCEEDED if good else PodPhase.FAILED,
            ready=False,
            exit_code=exit_code,
            reason=reason,
            message=self._unhealthy or self._last_words(good),
            finished_at=time.time(),
        )

    def _last_words(self, good: bool) -> str:
        with contextlib.suppress(FileNotFoundError):
            if words := self._termination_log.read_bytes()[:LONGEST_MESSAGE].decode(errors="replace").strip():
                return words
        return "" if good else log_tail(self._status.log)


def log_tail(log: Path, lines: int = TAIL_LINES) -> str:
    """The last lines of a log; empty without a log."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 64 * 1024))
        text = file.read().decode(errors="replace")
    return "\n".join(text.splitlines()[-lines:])
