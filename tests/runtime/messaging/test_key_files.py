"""A coordinator that the library starts has a generated key, which programs of the same user find."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from messaging_support.fleet import Fleet
from messaging_support.unknown_peer import receive, unknown_peer

from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.engine.worker.attach import AttachedEngine, attach_engine
from megatron_runtime.headers import Headers
from megatron_runtime.inference_client import InferenceClient
from megatron_runtime.sampling_params import SamplingParams
from megatron_runtime.wire import codec
from megatron_runtime.wire.key_files import find_key, forget_key, publish_key, remember_key
from megatron_runtime.wire.protocol_version import OWN
from megatron_runtime.wire.security import KEY_VARIABLE

ADDRESS = "tcp://127.0.0.1:5557"
KEY = "0123456789abcdef0123456789abcdef"
GREEDY = SamplingParams(temperature=0.0, num_tokens_to_generate=4)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the files, which no other test uses."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    return tmp_path / f"megatron-{os.getuid()}"


@pytest_asyncio.fixture
async def attached(tiny_parts: dict[str, Any]) -> AsyncIterator[AttachedEngine]:
    """An engine with its coordinator, started without a key."""
    engine = DynamicInferenceEngine.build(tiny_parts["model"], tiny_parts["tokenizer"], tiny_parts["inference_config"])
    attached = await attach_engine(engine)
    assert attached.coordinator is not None
    try:
        yield attached
    finally:
        await attached.loop.drain(5)
        await attached.task
        await attached.coordinator.stop(5)


def modes(folder: Path) -> dict[str, int]:
    """The permissions of the folder, and of the files in it by their names."""
    return {path.name * (path != folder): path.stat().st_mode & 0o777 for path in (folder, *folder.iterdir())}


async def answer(client: InferenceClient) -> int:
    """The number of generated tokens of one request."""
    async with asyncio.timeout(60):
        await client.start()
        result = await client.add_request([1, 2, 3], GREEDY)
    return len(result.merge().generated_tokens)


async def test_clients_of_the_same_user_need_only_the_address(attached: AttachedEngine, folder: Path) -> None:
    assert modes(folder) == {"": 0o700, f"coordinator-{attached.address.rpartition(':')[2]}.key": 0o600}
    forget_key(attached.address)  # as in another process
    client = InferenceClient(attached.address)
    assert await answer(client) == 4
    client.stop()
    hello = codec.encode(Headers.CONNECT, OWN, 1)
    with unknown_peer(attached.address, attached.key) as peer:
        peer.send_multipart(hello)
        await asyncio.to_thread(receive, peer, Headers.CONNECT_ACK)
    with unknown_peer(attached.address) as peer:
        peer.send_multipart(hello)
        assert await asyncio.to_thread(peer.poll, 500) == 0


async def test_a_coordinator_that_is_replaced_keeps_its_key_and_one_that_ends_removes_it(
    attached: AttachedEngine, folder: Path
) -> None:
    coordinator = attached.coordinator
    assert coordinator is not None
    assert coordinator.pid is not None
    key = find_key(attached.address)
    os.kill(coordinator.pid, signal.SIGKILL)
    client = InferenceClient(attached.address)
    assert await answer(client) == 4
    assert coordinator.restarts == 1
    forget_key(attached.address)
    assert find_key(attached.address) == key
    client.stop()
    await coordinator.stop(5)
    assert modes(folder) == {"": 0o700}


async def test_a_coordinator_without_a_key_removes_the_file_of_an_earlier_one(folder: Path) -> None:
    async with Fleet() as fleet:
        port = fleet.port
        publish_key(f"tcp://127.0.0.1:{port}", KEY)
        fleet.start_coordinator()
        assert modes(folder) == {"": 0o700}
        assert (await fleet.connect()).is_connected


def test_keys_are_those_of_the_process_then_of_the_environment_then_of_the_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert find_key(5557) is None
    publish_key(ADDRESS, KEY)
    assert [find_key(address) for address in (5557, "localhost:5557", ADDRESS)] == [KEY] * 3
    assert find_key("127.0.0.1:5558") is None
    assert find_key("10.0.0.7:5557") is None
    monkeypatch.setenv(KEY_VARIABLE, "of the environment")
    assert find_key("10.0.0.7:5557") == find_key(5557) == "of the environment"
    remember_key("10.0.0.7:5557", "of the process")
    assert find_key("tcp://10.0.0.7:5557") == "of the process"
    forget_key("10.0.0.7:5557")
    assert find_key("10.0.0.7:5557") == "of the environment"


def test_a_folder_that_others_can_use_is_neither_written_nor_read(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    publish_key(ADDRESS, KEY)
    folder.chmod(0o755)
    assert find_key(ADDRESS) is None
    publish_key("tcp://127.0.0.1:5558", KEY)
    assert "is not a folder that only its user can use" in caplog.text
    assert [file.name for file in folder.iterdir()] == ["coordinator-5557.key"]
    folder.rename(folder.with_suffix(".other"))
    folder.symlink_to(folder.with_suffix(".other"))
    folder.with_suffix(".other").chmod(0o700)
    assert find_key(ADDRESS) is None
