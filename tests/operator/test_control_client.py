"""The client of the control API, against a server with configured answers."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import itertools
import json
import socket
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from megatron_operator import control_client
from megatron_operator.control_client import KEEPALIVE_TIMEOUT, ControlApiUnreachable, ControlClient
from megatron_operator.observed_state import EngineState, Loading, ObservedReplica, Signal, SignalRefused

HOST = "127.0.0.1"
ESTABLISHED = "01"
"""The state of an open connection in /proc."""
KEEPALIVE = "02"
"""The kind of a timer in /proc."""
STATE = {
    "revision": 17,
    "role": "leader",
    "engineState": "RUNNING",
    "replicaGroups": [{"index": 0, "state": "RUNNING", "runningRequests": 1, "waitingRequests": 0}],
    "ranks": [
        {"rank": 0, "phase": "Serving", "loadedBytes": 5, "totalBytes": 5, "message": "", "registered": True},
        {"rank": 1, "phase": "Loading", "loadedBytes": 1, "totalBytes": 5, "message": ""},
    ],
    "requests": {"running": 1, "waiting": 2},
    "ready": True,
    "draining": False,
    "restarts": 3,
    "error": None,
}


class Launcher(ThreadingHTTPServer):
    """Gives one answer to all requests, and records them."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__((HOST, 0), _Handler)
        self.status, self.body = 200, json.dumps(STATE)
        self.headers: dict[str, str] = {}
        self.parts: Callable[[], Iterable[bytes]] = lambda: [self.body.encode()]
        self.asked: list[tuple[str, str, str | None]] = []
        self.was_asked, self.has_news, self.has_ended = threading.Event(), threading.Event(), threading.Event()
        self.has_news.set()

    def answer(self, status: int, body: Any) -> None:
        """Sets the next answers."""
        self.status, self.body = status, body if isinstance(body, str) else json.dumps(body)


class _Handler(BaseHTTPRequestHandler):
    server: Launcher

    def do_GET(self) -> None:
        self.server.asked.append((self.command, self.path, self.headers.get("Authorization")))
        self.server.was_asked.set()
        self.server.has_news.wait(30)
        self.send_response(self.server.status)
        for name, value in self.server.headers.items():
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            for part in self.server.parts():
                self.wfile.write(part)

    do_POST = do_GET  # noqa: N815  # the name that the standard library looks for

    def log_message(self, *_: Any) -> None:
        """Logs nothing."""


def timer_of_connection_to(port: int) -> tuple[str, int]:
    """The kind of the kernel's timer of an open connection, and the hundredths of a second until it fires."""
    connections = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    wanted = f":{port:04X}", ESTABLISHED
    kind, left = next(fields[5] for fields in connections if (fields[2][-5:], fields[3]) == wanted).split(":")
    return kind, int(left, 16)


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    with Launcher() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.has_ended.set()
        server.shutdown()
        thread.join()


@pytest.fixture
async def client(launcher: Launcher) -> Any:
    async with ControlClient("s3cret", port=launcher.server_address[1]) as made:
        yield made


async def test_the_state_of_the_leader_is_parsed(launcher: Launcher, client: ControlClient) -> None:
    report = await client.state(HOST)
    assert report.engine.state is EngineState.RUNNING
    assert report.engine.replicas == (ObservedReplica(0, EngineState.RUNNING),)
    assert (report.engine.running_requests, report.engine.waiting_requests) == (1, 2)
    assert (report.revision, report.restarts, report.ready) == (17, 3, True)
    assert launcher.asked == [("GET", "/v1/state", "Bearer s3cret")]


async def test_the_phase_of_a_pod_is_that_of_its_slowest_rank(client: ControlClient) -> None:
    report = await client.state(HOST)
    assert report.rank_phase == "Loading"
    assert report.loading == Loading(6, 10)


async def test_a_starting_worker_has_no_engine_state(launcher: Launcher, client: ControlClient) -> None:
    launcher.answer(200, {"revision": 1, "role": "worker", "engineState": None, "ranks": [], "error": None})
    report = await client.state(HOST)
    assert report.engine.state is None
    assert report.rank_phase is None
    assert report.loading is None


async def test_a_long_poll_sends_the_last_revision(launcher: Launcher, client: ControlClient) -> None:
    await client.state(HOST, after=17, wait=20)
    assert launcher.asked[0][1] == "/v1/state?after=17&timeout=20"


async def test_an_error_of_the_launcher_is_reported(launcher: Launcher, client: ControlClient) -> None:
    launcher.answer(200, {**STATE, "error": {"reason": "RankFailed", "message": "rank 1 ended"}})
    assert (await client.state(HOST)).engine.message == "rank 1 ended"


@pytest.mark.parametrize("body", ["no json", "[]", "{}", '{"revision": "x"}', '{"revision": 1, "engineState": "ODD"}'])
async def test_an_invalid_answer_counts_as_unreachable(launcher: Launcher, client: ControlClient, body: str) -> None:
    launcher.answer(200, body)
    with pytest.raises(ControlApiUnreachable, match="invalid state"):
        await client.state(HOST)


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"revision": 1, "ranks": ' + "[" * 100_000, "nested too deeply"),
        ('{"revision": 1e999}', "infinity"),
        ('{"revision": ' + "1" * 5000 + "}", "integer"),
        ('{"revision": 1, "engineState": "\\ud800"}', "invalid state"),
        ('{"revision": 1, "x": "' + "x" * (1 << 18) + '"}', "more than 262144 bytes"),
        ('{"revision": 1, "ranks": [' + "{}," * 1024 + "{}]}", "ranks: has 1025 entries, at most 1024 are valid"),
    ],
    ids=["deep array", "deep field", "infinite", "long integer", "lone surrogate", "long", "many ranks"],
)
async def test_an_answer_that_would_harm_the_operator_counts_as_unreachable(
    launcher: Launcher, client: ControlClient, body: str, cause: str
) -> None:
    for status in (200, 500):
        launcher.answer(status, body)
        with pytest.raises(ControlApiUnreachable, match=cause if status == 200 else None) as refused:
            await client.state(HOST)
        assert len(str(refused.value).encode()) < 5000
    launcher.answer(200, STATE)
    assert (await client.state(HOST)).revision == 17


async def test_a_compressed_answer_is_not_expanded(launcher: Launcher, client: ControlClient) -> None:
    launcher.headers = {"Content-Encoding": "gzip"}
    bomb = gzip.compress(b'{"revision": 1, "x": "' + b"x" * 100_000_000 + b'"}')
    launcher.parts = lambda: [bomb]
    tracemalloc.start()
    try:
        with pytest.raises(ControlApiUnreachable, match="the encoding gzip"):
            await client.state(HOST)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


async def test_an_endless_answer_is_cut_off(launcher: Launcher, client: ControlClient) -> None:
    launcher.parts = lambda: itertools.repeat(b" " * 65536)
    with pytest.raises(ControlApiUnreachable, match="more than 262144 bytes"):
        await client.state(HOST)


async def test_an_answer_that_never_completes_has_one_deadline(
    launcher: Launcher, client: ControlClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_client, "ANSWER_TIMEOUT", 0.5)

    def drip() -> Iterator[bytes]:
        while not launcher.has_ended.wait(0.1):
            yield b" "

    launcher.parts = drip
    with pytest.raises(ControlApiUnreachable, match=r"did not complete its answer within 2\.5 s"):
        await client.state(HOST)


async def test_a_message_of_a_pod_is_shortened_and_can_be_written_to_the_status(
    launcher: Launcher, client: ControlClient
) -> None:
    launcher.answer(200, {**STATE, "error": {"message": "\ud800" + "x" * 100_000}})
    message = (await client.state(HOST)).engine.message
    assert len(message) == 1000
    assert message.encode().startswith(b"?xxx")


async def test_a_rejected_token_is_reported(launcher: Launcher, client: ControlClient) -> None:
    launcher.answer(401, {"error": {"code": "Unauthorized", "message": "send the control token"}})
    with pytest.raises(ControlApiUnreachable, match="401: send the control token"):
        await client.state(HOST)


async def test_a_signal_is_accepted(launcher: Launcher, client: ControlClient) -> None:
    launcher.answer(202, {"accepted": True, "engineState": "PAUSING"})
    await client.signal(HOST, Signal.PAUSE)
    assert launcher.asked == [("POST", "/v1/pause", "Bearer s3cret")]


async def test_a_signal_in_the_wrong_state_is_rejected_with_the_allowed_ones(
    launcher: Launcher, client: ControlClient
) -> None:
    error = {"code": "InvalidState", "message": "engine is RUNNING", "engineState": "RUNNING", "allowed": ["pause"]}
    launcher.answer(409, {"error": error})
    with pytest.raises(SignalRefused, match="engine is RUNNING") as caught:
        await client.signal(HOST, Signal.SUSPEND)
    assert caught.value.allowed == ("pause",)


async def test_a_signal_without_a_reachable_pod_fails_as_unreachable(launcher: Launcher, client: ControlClient) -> None:
    launcher.answer(503, {"error": {"code": "EngineUnreachable", "message": "no coordinator"}})
    with pytest.raises(ControlApiUnreachable, match="no coordinator"):
        await client.signal(HOST, Signal.PAUSE)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's timers are read from /proc")
async def test_a_waiting_poll_uses_tcp_keepalive(launcher: Launcher, client: ControlClient) -> None:
    for _ in range(20):  # leaves closed connections to this port, as a server before it may have
        socket.create_connection(launcher.server_address[:2]).close()
    launcher.has_news.clear()
    polling = asyncio.create_task(client.state(HOST, after=17, wait=20))
    assert await asyncio.to_thread(launcher.was_asked.wait, 20)
    kind, hundredths = timer_of_connection_to(launcher.server_address[1])
    launcher.has_news.set()
    await polling
    assert kind == KEEPALIVE
    assert hundredths <= 100 * KEEPALIVE_TIMEOUT


@pytest.mark.parametrize(("registered", "heard"), [(True, True), (False, False), (None, False)])
async def test_a_pod_is_registered_when_its_first_rank_is(
    launcher: Launcher, client: ControlClient, registered: bool | None, heard: bool
) -> None:
    follower: dict[str, Any] = {"rank": 1, "phase": "Serving"}
    first = follower | {"rank": 0} | ({} if registered is None else {"registered": registered})
    launcher.answer(200, {**STATE, "ranks": [first, follower]})
    assert (await client.state(HOST)).registered is heard


async def test_a_pod_with_a_closed_port_is_unreachable(launcher: Launcher) -> None:
    port = launcher.server_address[1]
    launcher.server_close()
    async with ControlClient(None, port=port) as client:
        with pytest.raises(ControlApiUnreachable, match="does not answer"):
            await client.state(HOST)
