"""HTTP probes of a container: startup, liveness and readiness, as the kubelet performs them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from megatron_operator.local.pod_manifest import PodError, needed, number, numbered_port

LONGEST_WAIT_SECONDS = 0.5
"""Upper limit for the period of a probe: local probes are cheap, and readiness shows sooner."""

Ask = Callable[[], Awaitable[bool]]


@dataclass(frozen=True)
class Probe:
    """One probe of a container. Times are in seconds."""

    path: str
    port: int
    scheme: str
    headers: Mapping[str, str]
    initial_delay: float
    period: float
    timeout: float
    failure_threshold: int

    @property
    def patience(self) -> float:
        """Seconds of continuous failure after which the probe counts as failed."""
        return self.period * self.failure_threshold

    @classmethod
    def of(cls, container: Mapping[str, Any], kind: str) -> Probe | None:
        """The container's ``startupProbe``, ``livenessProbe`` or ``readinessProbe``. Raises PodError unless HTTP."""
        spec = container.get(kind)
        if not spec:
            return None
        if "httpGet" not in spec:
            raise PodError(f"{kind}: only httpGet is possible for processes")
        get, where = spec["httpGet"], f"{kind}.httpGet"
        port = numbered_port(container, needed(get, "port", where))
        headers = enumerate(get.get("httpHeaders") or [])
        return cls(
            path=get.get("path", "/"),
            port=port,
            scheme=str(get.get("scheme", "HTTP")).lower(),
            headers={needed(it, "name", f"{where}.httpHeaders[{i}]"): str(it.get("value", "")) for i, it in headers},
            initial_delay=number(spec, "initialDelaySeconds", kind, 0),
            period=number(spec, "periodSeconds", kind, 10),
            timeout=number(spec, "timeoutSeconds", kind, 1),
            failure_threshold=int(number(spec, "failureThreshold", kind, 3)),
        )

    async def passes(self, client: httpx.AsyncClient, address: str) -> bool:
        """One request: True for a status from 200 to 399."""
        url = f"{self.scheme}://{address}:{self.port}{self.path}"
        try:
            response = await client.get(url, headers=dict(self.headers), timeout=self.timeout)
        except httpx.HTTPError:
            return False
        return 200 <= response.status_code < 400


async def wait_until_started(probe: Probe, ask: Ask) -> bool:
    """Probe until it passes. False when it has failed for too long."""
    await asyncio.sleep(probe.initial_delay)
    deadline = time.monotonic() + probe.patience
    while not await ask():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(min(probe.period, LONGEST_WAIT_SECONDS))
    return True


async def wait_until_unhealthy(probe: Probe, ask: Ask) -> None:
    """Probe until it has failed ``failure_threshold`` times in a row."""
    await asyncio.sleep(probe.initial_delay)
    failures = 0
    while failures < probe.failure_threshold:
        failures = 0 if await ask() else failures + 1
        await asyncio.sleep(probe.period)


async def watch_readiness(probe: Probe, ask: Ask, tell: Callable[[bool], None]) -> None:
    """Probe forever, and report each change of readiness: a pass at once, a failure when it lasts."""
    await asyncio.sleep(probe.initial_delay)
    last_pass = -probe.patience
    while True:
        if await ask():
            last_pass = time.monotonic()
            tell(True)
        elif time.monotonic() - last_pass >= probe.patience:
            tell(False)
        await asyncio.sleep(min(probe.period, LONGEST_WAIT_SECONDS))
