"""Peers that speak other versions of the protocol are refused in words, on both sides."""

from __future__ import annotations

import pytest
from messaging_support.fleet import Fleet, until
from messaging_support.unknown_peer import receive, unknown_peer

from megatron_runtime.engine.worker import coordinator_connection
from megatron_runtime.errors import CoordinatorError, EngineError
from megatron_runtime.headers import EngineState, Headers
from megatron_runtime.inference_client import client as client_module
from megatron_runtime.sampling_params import SamplingParams
from megatron_runtime.wire import codec
from megatron_runtime.wire.items import EngineLoad, Registration
from megatron_runtime.wire.protocol_version import NONE, OWN, Protocol

LATER = Protocol(7, 9)
PARAMS = SamplingParams(num_tokens_to_generate=3)
REGISTRATION = Registration(5, 0, "x", EngineState.RUNNING, False, [], EngineLoad(), "").wire()


@pytest.mark.parametrize(
    ("own", "peer", "words"),
    [
        (Protocol(2, 3), Protocol(1, 2), None),
        (Protocol(1, 2), Protocol(2, 3), None),
        (
            Protocol(2, 3),
            Protocol(1, 1),
            "the peer speaks version 1 of the protocol, the coordinator versions 2 to 3;",
        ),
        (
            Protocol(1, 1),
            Protocol(2, 2),
            "the peer speaks version 2 of the protocol, the coordinator version 1;",
        ),
        (OWN, NONE, "the peer speaks no version of the protocol, the coordinator version 1; install"),
    ],
)
def test_peers_need_a_common_version(own: Protocol, peer: Protocol, words: str | None) -> None:
    reason = own.why_not(peer)
    assert reason is None if words is None else reason is not None and reason.startswith(words)


@pytest.mark.parametrize(
    ("frames", "refusal"),
    [
        (codec.encode(Headers.CONNECT, 1), Headers.CONNECT_REFUSED),
        (codec.encode(Headers.CONNECT, LATER, 1, "a new argument"), Headers.CONNECT_REFUSED),
        (codec.encode(Headers.REGISTER, *REGISTRATION), Headers.REGISTER_REFUSED),
        (codec.encode(Headers.REGISTER, LATER, *REGISTRATION, "a new argument"), Headers.REGISTER_REFUSED),
    ],
    ids=["client without versions", "later client", "engine without versions", "later engine"],
)
async def test_the_coordinator_refuses_a_peer_of_other_versions_and_logs_why(
    fleet: Fleet, frames: list[bytes], refusal: Headers
) -> None:
    client = await fleet.connect()
    with unknown_peer(fleet.address) as peer:
        peer.send_multipart(frames)
        (reason,) = receive(peer, refusal).args
    spoken = "versions 7 to 9" if "a new argument" in codec.decode(frames).args else "no version"
    assert reason.startswith(f"the peer speaks {spoken} of the protocol, the coordinator version 1; install the client")
    assert (await client.service_state()).engines == ()
    assert fleet.coordinator is not None
    assert reason in fleet.coordinator._core.protocol_errors.counts


async def test_a_client_of_other_versions_fails_at_once_with_both_versions(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.connect()
    monkeypatch.setattr(client_module, "OWN", LATER)
    late = client_module.InferenceClient(fleet.port)
    welcome = late.start()
    request = late.add_request("hello", PARAMS)
    try:
        with pytest.raises(
            CoordinatorError, match=r"refused this client: the peer speaks versions 7 to 9 .* version 1;"
        ):
            await welcome
        with pytest.raises(CoordinatorError, match="versions 7 to 9"):
            await request
    finally:
        late.stop()


async def test_a_client_that_also_speaks_an_earlier_version_is_served(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "OWN", Protocol(1, 2))
    fleet.add_engine()
    client = await fleet.connect()
    await fleet.ready(client, 1)
    assert (await client.add_request("hello", PARAMS)).succeeded()


async def test_an_engine_of_other_versions_ends_with_both_versions(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator_connection, "OWN", LATER)
    await fleet.connect()
    loop = fleet.add_engine()
    await until(lambda: loop.failure, "the refusal")
    assert isinstance(loop.failure, EngineError)
    assert "refused this engine: the peer speaks versions 7 to 9 of the protocol, the coordinator version 1" in str(
        loop.failure
    )
