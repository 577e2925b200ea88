"""Unreachable pods: since when, and without delaying observations."""

from __future__ import annotations

import asyncio
import time

import pytest

from megatron_operator import observation
from megatron_operator.control_client import ControlApiUnreachable, ControlClient, PodReport
from megatron_operator.observation import ControlApiPoller, NoAnswer


class Launchers(ControlClient):
    """Of one pod, which answers when the test lets it."""

    def __init__(self) -> None:
        super().__init__(None)
        self.asked = 0
        self.going_on = asyncio.Event()
        self.going_on.set()
        self.refuses = False

    async def try_state(self, address: str) -> PodReport | ControlApiUnreachable:
        self.asked += 1
        await self.going_on.wait()
        return (
            ControlApiUnreachable(f"{address} refused") if self.refuses else PodReport(revision=self.asked, ready=True)
        )


@pytest.fixture
def control_client(monkeypatch: pytest.MonkeyPatch) -> Launchers:
    monkeypatch.setattr(observation, "RESPONSIVE_WAIT", 0.05)
    monkeypatch.setattr(observation, "UNRESPONSIVE_WAIT", 0.01)
    return Launchers()


def silence(answer: PodReport | NoAnswer) -> NoAnswer:
    assert isinstance(answer, NoAnswer)
    return answer


async def test_a_pod_is_unreachable_since_its_first_failed_poll(control_client: Launchers) -> None:
    poller = ControlApiPoller(lambda: None)
    assert await poller.poll(control_client, "a", "10.0.0.1") == PodReport(revision=1, ready=True)
    control_client.refuses = True
    before = time.time()
    first = silence(await poller.poll(control_client, "a", "10.0.0.1"))
    assert before <= first.since <= time.time()
    assert first.cause == "10.0.0.1 refused"
    assert silence(await poller.poll(control_client, "a", "10.0.0.1")).since == first.since
    control_client.refuses = False
    assert await poller.poll(control_client, "a", "10.0.0.1") == PodReport(revision=4, ready=True)
    control_client.refuses = True
    assert silence(await poller.poll(control_client, "a", "10.0.0.1")).since > first.since
    await poller.close()


async def test_a_hanging_pod_has_one_poll_at_a_time_and_its_late_answer_is_used(
    control_client: Launchers,
) -> None:
    told = asyncio.Event()
    poller = ControlApiPoller(told.set)
    control_client.going_on.clear()
    since = {silence(await poller.poll(control_client, "a", "10.0.0.1")).since for _ in range(3)}
    assert (len(since), control_client.asked) == (1, 1)
    control_client.going_on.set()
    await asyncio.wait_for(told.wait(), 10)
    assert await poller.poll(control_client, "a", "10.0.0.1") == PodReport(revision=2, ready=True)
    await poller.close()


async def test_a_late_answer_is_used_by_the_next_observation(control_client: Launchers) -> None:
    poller = ControlApiPoller(lambda: None)
    control_client.going_on.clear()
    silence(await poller.poll(control_client, "a", "10.0.0.1"))
    control_client.going_on.set()
    assert await poller.poll(control_client, "a", "10.0.0.1") == PodReport(revision=1, ready=True)
    await poller.close()


async def test_state_of_deleted_pods_is_dropped(control_client: Launchers) -> None:
    told: list[bool] = []
    poller = ControlApiPoller(lambda: told.append(True))
    control_client.going_on.clear()
    first = silence(await poller.poll(control_client, "a", "10.0.0.1"))
    await poller.keep_only({"b"})
    control_client.going_on.set()
    await asyncio.sleep(0.05)
    assert told == []
    control_client.refuses = True
    assert silence(await poller.poll(control_client, "a", "10.0.0.1")).since > first.since
    await poller.close()
