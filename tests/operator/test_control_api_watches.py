"""The watches of pods whose answers cost the operator as much as they can."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from megatron_operator.control_client import MAX_ANSWER_BYTES, ControlClient
from megatron_operator.kubernetes import control_api_watches
from megatron_operator.kubernetes.control_api_watches import ControlApiWatches
from megatron_operator.observed_state import ObservedPod, ObservedState, PodPhase

PODS = 20
PERIOD = 2.0
"""Seconds. Without limits, each pod is polled seven times meanwhile."""


class HostilePods:
    """A server for the states of all pods, which change all the time."""

    def __init__(self) -> None:
        self.reads = 0
        self.answer: Any = self.large
        self._revisions = itertools.count(1)
        application = web.Application()
        application.router.add_get("/v1/state", self._take)
        self.server = TestServer(application, host="127.0.0.1")

    async def _take(self, _: web.Request) -> web.Response:
        self.reads += 1
        response: web.Response = self.answer()
        return response

    def large(self) -> web.Response:
        """A valid state that is nearly as large as possible."""
        body = {"revision": next(self._revisions), "x": "x" * (MAX_ANSWER_BYTES - 1000)}
        return web.Response(text=json.dumps(body))

    def small(self) -> web.Response:
        """A valid state."""
        return web.json_response({"revision": next(self._revisions)})

    def refused(self) -> web.Response:
        """An answer that is too large."""
        return web.Response(text=" " * (MAX_ANSWER_BYTES + 1))

    def failed(self) -> web.Response:
        """An error with a large message."""
        return web.Response(text="x" * (MAX_ANSWER_BYTES - 1), status=500)


@pytest.fixture
async def pods() -> AsyncIterator[HostilePods]:
    pods = HostilePods()
    await pods.server.start_server()
    yield pods
    await pods.server.close()


async def follow(pods: HostilePods, count: int, seconds: float) -> int:
    """Watch so many pods for a time. Returns the number of changes."""
    changes: list[None] = []
    watches = ControlApiWatches(lambda: changes.append(None))
    async with ControlClient(None, port=pods.server.port or 0) as client:
        adapter: Any = SimpleNamespace(control_client=client, revisions={})
        watches.follow(ObservedState(now=0.0, pods=tuple(map(observed, range(count)))), adapter)
        await asyncio.sleep(seconds)
        await watches.close()
    return len(changes)


def observed(number: int) -> ObservedPod:
    return ObservedPod(
        name=f"chat-{number}",
        uid=str(number),
        group=number,
        attempt=0,
        index=0,
        leader=True,
        template_hash="",
        phase=PodPhase.RUNNING,
        ready=True,
        created_at=0.0,
        address="127.0.0.1",
    )


async def test_large_states_that_change_all_the_time_are_read_at_a_limited_rate(pods: HostilePods) -> None:
    changes = await follow(pods, PODS, PERIOD)
    assert PODS <= pods.reads <= 2 * PODS
    assert 1 <= changes <= 4


@pytest.mark.parametrize("kind", ["refused", "failed"])
async def test_a_pod_with_invalid_answers_is_asked_less_and_less(
    pods: HostilePods, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_api_watches, "RETRY", 0.1)
    pods.answer = getattr(pods, kind)
    changes = await follow(pods, 1, PERIOD)
    assert 2 <= pods.reads <= 5  # after 0, 0.1, 0.3, 0.7 and 1.5 s
    assert changes == 0


async def test_many_pods_with_small_states_cause_one_change_at_a_time(pods: HostilePods) -> None:
    pods.answer = pods.small
    changes = await follow(pods, PODS, PERIOD)
    assert pods.reads >= PODS
    assert 2 <= changes <= 8


async def test_a_pod_recovers_from_an_invalid_answer(pods: HostilePods, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_api_watches, "RETRY", 0.01)
    answers = itertools.chain([pods.failed, pods.failed], itertools.repeat(pods.small))
    pods.answer = lambda: next(answers)()
    changed = asyncio.Event()
    watches = ControlApiWatches(changed.set)
    async with ControlClient(None, port=pods.server.port or 0) as client:
        adapter: Any = SimpleNamespace(control_client=client, revisions={})
        watches.follow(ObservedState(now=0.0, pods=(observed(0),)), adapter)
        await changed.wait()
        await watches.close()
    assert pods.reads >= 3
