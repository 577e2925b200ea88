"""Who is silent, since when, and how little that holds up a look."""

from __future__ import annotations

import asyncio
import time

import pytest

from megatron_operator import hearing
from megatron_operator.engine import EngineClient, EngineUnreachable, PodReport
from megatron_operator.hearing import Hearing, Silence


class Launchers(EngineClient):
    """Of one pod, which answers when the test says so."""

    def __init__(self) -> None:
        super().__init__(None)
        self.asked = 0
        self.going_on = asyncio.Event()
        self.going_on.set()
        self.refuses = False

    async def answer(self, address: str) -> PodReport | EngineUnreachable:
        self.asked += 1
        await self.going_on.wait()
        return EngineUnreachable(f"{address} refused") if self.refuses else PodReport(revision=self.asked, ready=True)


@pytest.fixture
def launchers(monkeypatch: pytest.MonkeyPatch) -> Launchers:
    monkeypatch.setattr(hearing, "FIRST_WAIT", 0.05)
    monkeypatch.setattr(hearing, "NEXT_WAIT", 0.01)
    return Launchers()


def silence(answer: PodReport | Silence) -> Silence:
    assert isinstance(answer, Silence)
    return answer


async def test_silence_begins_with_the_first_question_that_gets_no_answer(launchers: Launchers) -> None:
    ears = Hearing(lambda: None)
    assert await ears.ask(launchers, "a", "10.0.0.1") == PodReport(revision=1, ready=True)
    launchers.refuses = True
    before = time.time()
    first = silence(await ears.ask(launchers, "a", "10.0.0.1"))
    assert before <= first.since <= time.time()
    assert first.why == "10.0.0.1 refused"
    assert silence(await ears.ask(launchers, "a", "10.0.0.1")).since == first.since
    launchers.refuses = False
    assert await ears.ask(launchers, "a", "10.0.0.1") == PodReport(revision=4, ready=True)
    launchers.refuses = True
    assert silence(await ears.ask(launchers, "a", "10.0.0.1")).since > first.since
    await ears.close()


async def test_a_pod_that_stands_still_is_asked_one_question_at_a_time_and_its_late_answer_is_told(
    launchers: Launchers,
) -> None:
    told = asyncio.Event()
    ears = Hearing(told.set)
    launchers.going_on.clear()
    since = {silence(await ears.ask(launchers, "a", "10.0.0.1")).since for _ in range(3)}
    assert (len(since), launchers.asked) == (1, 1)
    launchers.going_on.set()
    await asyncio.wait_for(told.wait(), 10)
    assert await ears.ask(launchers, "a", "10.0.0.1") == PodReport(revision=2, ready=True)
    await ears.close()


async def test_an_answer_that_comes_while_a_later_look_waits_is_that_looks(launchers: Launchers) -> None:
    ears = Hearing(lambda: None)
    launchers.going_on.clear()
    silence(await ears.ask(launchers, "a", "10.0.0.1"))
    launchers.going_on.set()
    assert await ears.ask(launchers, "a", "10.0.0.1") == PodReport(revision=1, ready=True)
    await ears.close()


async def test_nothing_is_kept_of_pods_that_are_gone(launchers: Launchers) -> None:
    told: list[bool] = []
    ears = Hearing(lambda: told.append(True))
    launchers.going_on.clear()
    first = silence(await ears.ask(launchers, "a", "10.0.0.1"))
    await ears.forget_others({"b"})
    launchers.going_on.set()
    await asyncio.sleep(0.05)
    assert told == []
    launchers.refuses = True
    assert silence(await ears.ask(launchers, "a", "10.0.0.1")).since > first.since
    await ears.close()
