"""Clients that send little and hold much, with real connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from planning_support.activating import CHAT, SHORT, Client, ModelInCluster, shorten_times

from megatron_operator.activator.limits import Limits

HEAD = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\n".encode()
SLOW = 1.0
"""Seconds in which the parts of a request arrive, also on a busy machine."""
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture
async def model(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ModelInCluster]:
    shorten_times(monkeypatch)
    model = ModelInCluster()
    await model.start()
    yield model
    await model.stop()


async def connect(client: Client, content: bytes, address: str = "127.0.0.1") -> Connection:
    """A connection from this address that sends the content, and then nothing."""
    port = client.http.base_url.port
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
    writer.write(content)
    await writer.drain()
    return reader, writer


async def end_of(connection: Connection) -> bytes:
    """What the connection receives until the activator closes it."""
    reader, writer = connection
    try:
        return await reader.read()
    finally:
        writer.close()
        await writer.wait_closed()


async def is_alive(client: Client, address: str) -> bool:
    """Whether a connection from this address is served."""
    try:
        return b" 200 OK\r\n" in await end_of(await connect(client, b"GET /healthz HTTP/1.0\r\n\r\n", address))
    except ConnectionError:
        return False


async def until_bytes(client: Client, count: int) -> None:
    while client.activator.usage.body_bytes != count:  # noqa: ASYNC110  # nothing reports it
        await asyncio.sleep(0.01)


async def test_a_body_that_is_only_announced_takes_no_memory_of_others(model: ModelInCluster) -> None:
    async with Client(model, Limits(body_bytes=100, total_body_bytes=200)) as client:
        stuck = [await connect(client, HEAD + b"Content-Length: 100\r\n\r\n{") for _ in range(3)]
        await until_bytes(client, 3)
        assert (await client.ask(a="b" * 20)).status_code == 200
        for _, writer in stuck:
            writer.close()


async def test_one_address_gets_a_part_of_the_bytes(model: ModelInCluster) -> None:
    async with Client(model, Limits(total_body_bytes=200, address_share=0.25)) as client:
        _, writer = await connect(client, HEAD + b"Content-Length: 50\r\n\r\n" + b"x" * 49, "127.0.0.2")
        await until_bytes(client, 49)
        refused = await end_of(await connect(client, HEAD + b"Content-Length: 3\r\n\r\nxx", "127.0.0.2"))
        assert refused.startswith(b"HTTP/1.1 503 ")
        assert b"of requests from 127.0.0.2 exceed the 50 bytes" in refused
        assert (await client.ask(a="b" * 20)).status_code == 200
        writer.close()
        await until_bytes(client, 0)
        assert (await client.ask(a="b" * 20)).status_code == 200
    assert client.activator.usage.addresses == {}


@pytest.mark.parametrize("length", [b"Content-Length: 100\r\n\r\nx", b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n"])
async def test_a_body_that_does_not_arrive_ends_its_request(model: ModelInCluster, length: bytes) -> None:
    async with Client(model, Limits(body_timeout=SHORT)) as client:
        answer = await end_of(await connect(client, HEAD + length))
        assert client.activator.usage.body_bytes == 0
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"the body was not received within 0.05 s" in answer
    assert model.requests == []


@pytest.mark.parametrize("content", [b"", HEAD])
async def test_a_head_that_does_not_arrive_ends_its_connection(model: ModelInCluster, content: bytes) -> None:
    async with Client(model, Limits(head_timeout=SHORT)) as client:
        answer = await end_of(await connect(client, content))
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"was not received within 0.05 s" in answer


async def test_the_head_of_a_later_request_has_a_limit_too(model: ModelInCluster) -> None:
    async with Client(model, Limits(head_timeout=SLOW)) as client:
        reader, writer = await connect(client, b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert await reader.readuntil(b"ok\n")
        writer.write(HEAD)
        assert (await end_of((reader, writer))).startswith(b"HTTP/1.1 408 ")


async def test_a_request_may_take_longer_than_its_head_and_its_body(model: ModelInCluster) -> None:
    model.become_idle()
    async with Client(model, Limits(head_timeout=SLOW, body_timeout=SLOW)) as client:
        answer = asyncio.create_task(client.ask())
        await model.activated.wait()
        await asyncio.sleep(1.5 * SLOW)
        model.become_ready()
        assert (await answer).status_code == 200


async def test_connections_are_limited_in_all_and_by_address(model: ModelInCluster) -> None:
    async with Client(model, Limits(connections=4, address_share=0.5)) as client:
        # The client has one open connection from 127.0.0.1 itself.
        open_ones = [await connect(client, b"", "127.0.0.2") for _ in range(2)]
        refused = await end_of(await connect(client, b"", "127.0.0.2"))
        assert refused.startswith(b"HTTP/1.1 503 ")
        assert b"too many connections from 127.0.0.2" in refused
        open_ones.append(await connect(client, b"", "127.0.0.3"))
        assert b"too many connections to this activator" in await end_of(await connect(client, b"", "127.0.0.4"))
        assert (await client.ask()).status_code == 200
        for _, writer in open_ones:
            writer.close()
        while not await is_alive(client, "127.0.0.2"):
            pass
