"""Automatic suspension of idle engines."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from megatron_runtime.errors import CoordinatorError
from megatron_runtime.headers import Headers
from megatron_runtime.launch.auto_suspend import AutoSuspend
from megatron_runtime.wire.service_state import EngineView, ServiceState

ENGINE = EngineView(0, 0, "RUNNING", 0, 0, 8, 0, 0, 0, 0.0, 0, draining=False, ready=True)
IDLE = ServiceState("RUNNING", 1, "epoch", (ENGINE,), 0, 0, 0, 0)
REACHED = {
    Headers.PAUSE: "PAUSED",
    Headers.SUSPEND: "SUSPENDED",
    Headers.RESUME: "PAUSED",
    Headers.UNPAUSE: "RUNNING",
}


class Service:
    """Engines that carry out signals at once, and a clock."""

    def __init__(self, idle_after: float = 10) -> None:
        self.state = IDLE
        self.sent: list[str] = []
        self.is_away = False
        self.now = 0.0
        self.auto = AutoSuspend(idle_after, self.obey, lambda: self.now)

    async def obey(self, signal: Headers) -> None:
        if self.is_away:
            raise CoordinatorError("away")
        self.sent.append(signal.name.lower())
        self.state = replace(self.state, state=REACHED[signal])
        self.auto.observe(self.state)

    async def look(self, after: float = 0, **changes: object) -> None:
        """Advance the clock, change the state, and observe it."""
        self.now += after
        self.state = replace(self.state, **changes)  # type: ignore[arg-type]
        self.auto.observe(self.state)
        for _ in range(9):
            await asyncio.sleep(0)


async def asleep() -> Service:
    service = Service()
    await service.look(after=11)
    assert (service.sent, service.auto.is_suspended) == (["pause", "suspend"], True)
    service.sent.clear()
    return service


async def test_an_engine_with_occasional_requests_keeps_running() -> None:
    service = Service()
    for request in range(1, 6):
        await service.look(after=9, accepted_requests=request)
    await service.look(after=9, outstanding_requests=1)
    await service.look(after=90)
    assert service.sent == []
    await service.look(after=9, outstanding_requests=0)
    assert not service.auto.is_suspended
    await service.look(after=9)
    assert service.auto.is_suspended


async def test_a_request_resumes_suspended_engines() -> None:
    service = await asleep()
    await service.look(after=1000)
    assert service.sent == []
    await service.look(outstanding_requests=1, accepted_requests=1)
    assert service.sent == ["resume", "unpause"]
    assert not service.auto.is_suspended
    await service.look(after=9, outstanding_requests=0)
    assert service.sent == ["resume", "unpause"]


async def test_engines_that_a_client_paused_stay_paused_and_the_idle_time_starts_when_they_run() -> None:
    service = Service()
    service.auto.override()
    await service.look(state="PAUSED")
    await service.look(after=100)
    await service.look(state="RUNNING", after=5)
    assert service.sent == []
    await service.look(after=11)
    assert service.sent == ["pause", "suspend"]


async def test_engines_that_a_client_controls_stay_suspended() -> None:
    service = await asleep()
    assert service.auto.override()
    await service.look(outstanding_requests=1)
    assert service.sent == []
    assert not service.auto.override()


async def test_a_failed_signal_is_sent_again_at_the_next_observation() -> None:
    service = await asleep()
    service.is_away = True
    await service.look(outstanding_requests=1)
    assert service.sent == []
    service.is_away = False
    await service.look()
    assert service.sent == ["resume", "unpause"]


async def test_a_service_without_engines_is_not_idle() -> None:
    service = Service()
    await service.look(after=100, engines=())
    await service.look(after=5, engines=(ENGINE,))
    assert service.sent == []


@pytest.mark.parametrize("state", ["PAUSING", "SUSPENDING", "RESUMING"])
async def test_no_signal_is_sent_during_a_transition(state: str) -> None:
    service = await asleep()
    await service.look(state=state, outstanding_requests=1)
    assert service.sent == []
    assert service.auto.is_suspended
