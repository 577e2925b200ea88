"""Kinds that a cluster lacks: one poll for all resources, which wake up when the kind is installed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import cast

import pytest

from megatron_operator.kubernetes import missing_kinds
from megatron_operator.kubernetes.api_server import ApiServer, ServerError
from megatron_operator.kubernetes.missing_kinds import MissingKinds
from megatron_operator.observed_state import ActionRefused, KindMissing

NOT_FOUND = ServerError("PATCH /apis/...: 404 page not found (404)", 404)
UNDECLARED = ServerError("PATCH /apis/...: .spec.rules[0].timeouts: field not declared in schema (500)", 500)
LOOKS = 0.01


class Server:
    """Reports whether a kind exists, and counts the requests."""

    def __init__(self) -> None:
        self.known = False
        self.fails = False
        self.asked = 0

    async def knows(self, kind: str) -> bool:
        assert kind == "HTTPRoute"
        self.asked += 1
        if self.fails:
            raise ServerError("the API server cannot be reached")
        return self.known


async def nobody_watches(kind: str) -> None:
    """For tests without objects of the kind."""
    raise AssertionError(f"there is no {kind} to be watched")


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
async def kinds(server: Server, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[MissingKinds]:
    monkeypatch.setattr(missing_kinds, "FIRST_PAUSE", LOOKS)
    monkeypatch.setattr(missing_kinds, "LONGEST_PAUSE", LOOKS)
    kinds = MissingKinds(cast(ApiServer, server), nobody_watches)
    yield kinds
    await kinds.close()


async def missed(kinds: MissingKinds) -> asyncio.Event:
    """A resource that waits for a missing kind."""
    woken = asyncio.Event()
    with pytest.raises(KindMissing, match=r"install the Gateway API, version 1\.2 or newer"):
        await kinds.explain("HTTPRoute", NOT_FOUND, woken.set)
    return woken


async def until(is_so: Callable[[], bool]) -> None:
    for _ in range(1000):
        if is_so():
            return
        await asyncio.sleep(LOOKS)
    raise AssertionError("waited in vain")


async def test_waiting_resources_wake_up_when_the_kind_is_installed(kinds: MissingKinds, server: Server) -> None:
    first, second = await missed(kinds), asyncio.Event()
    with pytest.raises(KindMissing):
        kinds.check("HTTPRoute", second.set)
    server.known = True
    await asyncio.wait_for(asyncio.gather(first.wait(), second.wait()), 10)
    kinds.check("HTTPRoute", second.set)
    assert not kinds.is_missing("HTTPRoute")


async def test_a_known_missing_kind_is_reported_without_a_request(
    kinds: MissingKinds, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(missing_kinds, "FIRST_PAUSE", 3600)
    await missed(kinds)
    for _ in range(100):
        with pytest.raises(KindMissing):
            kinds.check("HTTPRoute", lambda: None)
    assert server.asked == 1


async def test_an_unreachable_api_server_is_asked_again(kinds: MissingKinds, server: Server) -> None:
    woken = await missed(kinds)
    server.fails = server.known = True
    await until(lambda: server.asked >= 3)
    assert not woken.is_set()
    server.fails = False
    await asyncio.wait_for(woken.wait(), 10)


async def test_no_requests_are_sent_when_no_resource_waits(kinds: MissingKinds, server: Server) -> None:
    woken = await missed(kinds)
    kinds.forget(woken.set)
    await until(lambda: not kinds.is_missing("HTTPRoute"))
    assert server.asked == 1
    assert not (await missed(kinds)).is_set()


async def test_another_404_is_not_a_missing_kind(kinds: MissingKinds, server: Server) -> None:
    server.known = True
    await kinds.explain("HTTPRoute", NOT_FOUND, lambda: None)
    await kinds.explain("Service", NOT_FOUND, lambda: None)
    await kinds.explain("HTTPRoute", ServerError("etcdserver: request timed out (500)", 500), lambda: None)
    assert not kinds.is_missing("HTTPRoute")
    assert server.asked == 1


async def test_a_crd_that_is_too_old_is_rejected_with_the_remedy(kinds: MissingKinds) -> None:
    with pytest.raises(ActionRefused, match=r"timeouts: field not declared.*; install the Gateway API, version 1\.2"):
        await kinds.explain("HTTPRoute", UNDECLARED, lambda: None)


async def test_a_kind_with_existing_objects_is_watched(server: Server) -> None:
    watched: list[str] = []

    async def watch(kind: str) -> None:
        watched.append(kind)

    kinds = MissingKinds(cast(ApiServer, server), watch)
    for kind in ("HTTPRoute", "Service"):
        await kinds.found(kind)
    assert watched == ["HTTPRoute"]
