"""Frames, items and keys: valid messages survive encoding, invalid ones are refused."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from megatron_runtime.errors import ConfigurationError
from megatron_runtime.headers import EngineState, Headers
from megatron_runtime.wire import codec
from megatron_runtime.wire.bodies import RequestBody, TokenChunk
from megatron_runtime.wire.items import AdapterEntry, AdapterReport, EngineLoad, Registration, Submission, items
from megatron_runtime.wire.protocol_errors import QUIET_SECONDS, ProtocolErrors
from megatron_runtime.wire.security import coordinator_address, derive_keys, is_loopback, require_key_or_loopback
from megatron_runtime.wire.service_state import EngineView, ServiceState

tokens = st.lists(st.integers(0, 200_000), max_size=20)


@given(st.sampled_from(Headers), st.lists(st.integers(0, 5)), st.lists(st.binary(max_size=20), max_size=5))
def test_a_message_survives_encoding_and_decoding(header: Headers, args: list[int], bodies: list[bytes]) -> None:
    message = codec.decode(codec.encode(header, *args, bodies=bodies))
    assert (message.header, message.args, list(message.bodies)) == (header, args, bodies)


@given(st.one_of(st.text(), tokens), tokens)
def test_a_request_body_survives_packing_and_unpacking(prompt: str | list[int], made: list[int]) -> None:
    body = RequestBody(prompt, {"temperature": 0.5}, TokenChunk(made))
    assert RequestBody.unpack(body.pack()) == body


@given(st.lists(st.binary(max_size=40), max_size=4))
def test_arbitrary_bytes_are_a_message_or_malformed_and_nothing_else(frames: list[bytes]) -> None:
    try:
        message = codec.decode(frames)
    except codec.MalformedMessage:
        return
    assert isinstance(message.header, Headers)


@given(st.binary(max_size=60))
def test_arbitrary_bytes_are_a_body_or_malformed_and_nothing_else(body: bytes) -> None:
    for kind in (RequestBody, TokenChunk):
        try:
            content = kind.unpack(body)
        except codec.MalformedMessage:
            continue
        assert kind.unpack(content.pack()) == content


@pytest.mark.parametrize(
    ("frames", "defect"),
    [
        ([], "empty header"),
        ([b""], "empty header"),
        ([b"\xc1"], "undecodable header"),
        ([msgpack.packb({"a": 1})], "not a list"),
        ([msgpack.packb([])], "not a list"),
        ([msgpack.packb([True])], "not a list"),
        ([msgpack.packb([9999])], "unknown header"),
        ([b"\x91" * 2000 + b"\x00"], "undecodable header"),
        ([b"\x00" * (codec.MAX_HEADER_BYTES + 1)], "oversized header"),
        ([msgpack.packb([0])] * (codec.MAX_BATCH + 2), "too many frames"),
    ],
)
def test_every_defect_of_a_frame_is_named(frames: list[bytes], defect: str) -> None:
    with pytest.raises(codec.MalformedMessage, match=defect):
        codec.decode(frames)


def test_a_batch_needs_a_body_for_each_item() -> None:
    item = Submission(bytes(16), False, 0, [])
    good = codec.decode(codec.encode(Headers.SUBMIT_REQUEST, [item], bodies=[b"x"]))
    assert items(good, Submission.parse) == [item]
    with pytest.raises(codec.MalformedMessage, match="a wrong number of bodies for its items"):
        items(codec.decode(codec.encode(Headers.SUBMIT_REQUEST, [item])), Submission.parse)


def test_a_registration_survives_encoding_and_decoding() -> None:
    registration = Registration(
        3, 2, "abc", EngineState.PAUSED, True, [bytes(16)], EngineLoad(1, 2, 3, 4, 5, 6, 0.5, 7, 8, 9), "/models/7",
        AdapterReport(3, [AdapterEntry("a", "/a", 2)], [AdapterEntry("b", "/b", 0)]),
    )  # fmt: skip
    assert Registration.parse(codec.decode(codec.encode(Headers.REGISTER, *registration.wire()))) == registration


def test_an_engine_without_drafts_and_adapters_registers_as_earlier_versions_do() -> None:
    load = EngineLoad(1, 2, 3, 4, 5, 6, 0.5, 7)
    registration = Registration(3, 2, "abc", EngineState.PAUSED, True, [bytes(16)], load, "/models/7")
    message = codec.decode(codec.encode(Headers.REGISTER, *registration.wire()))
    assert message.args == [3, 2, "abc", "PAUSED", True, [bytes(16)], [1, 2, 3, 4, 5, 6, 0.5, 7], "/models/7"]
    assert Registration.parse(message) == registration


@pytest.mark.parametrize("count", [7, 9, 11])
def test_a_load_with_another_number_of_fields_is_malformed(count: int) -> None:
    with pytest.raises(codec.MalformedMessage, match="engine load is not a list of 10 fields"):
        EngineLoad.parse([0] * count)


def test_the_state_of_engines_without_drafts_is_that_of_earlier_versions() -> None:
    (view,) = service_state()["engines"]
    assert not {"draft_tokens", "accepted_draft_tokens"} & view.keys()
    assert "adapters" not in service_state()
    drafting = service_state(engines=({**view, "draft_tokens": 9, "accepted_draft_tokens": 4},))
    assert ServiceState.deserialize(drafting).serialize() == drafting


def test_a_body_that_is_too_large_is_refused_before_it_is_sent() -> None:
    with pytest.raises(ValueError, match="the limit is"):
        RequestBody("x" * (codec.MAX_BODY_BYTES + 1), {}).pack()


def test_equal_secrets_give_equal_keys_and_others_give_others() -> None:
    first, again, other = derive_keys("s" * 32), derive_keys("s" * 32), derive_keys("t" * 32)
    assert first == again
    assert len({first.server_secret, first.client_secret, other.server_secret, other.client_secret}) == 4
    assert zmq.curve_public(first.client_secret) == first.client_public


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="has 5 characters; give at least 32"):
        derive_keys("short")


@pytest.mark.parametrize(
    ("given_address", "meant"),
    [
        (5557, "tcp://127.0.0.1:5557"),
        ("host:1", "tcp://host:1"),
        ("tcp://host:1", "tcp://host:1"),
        ("tcp://[::1]:7", "tcp://[::1]:7"),
    ],
)
def test_an_address_may_be_a_port_host_and_port_or_whole(given_address: int | str, meant: str) -> None:
    assert coordinator_address(given_address) == meant


@pytest.mark.parametrize("address", ["", "host", "ipc://x", "tcp://host", "tcp://:1", "tcp://host:99999"])
def test_an_invalid_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigurationError, match="is not an address"):
        coordinator_address(address)


def test_plain_sockets_are_for_this_machine_only() -> None:
    assert is_loopback("127.5.6.7")
    assert is_loopback("::1")
    assert not is_loopback("10.0.0.1")
    assert not is_loopback("localhost.example.org")
    require_key_or_loopback("10.0.0.1", "k" * 32)
    with pytest.raises(ConfigurationError, match="without a coordinator key only loopback"):
        require_key_or_loopback("10.0.0.1", None)


def service_state(**changes: Any) -> dict[str, Any]:
    load = EngineLoad()._asdict()
    view = EngineView(replica_group=0, attempt=0, state="RUNNING", draining=False, ready=True, **load)
    return {**ServiceState("RUNNING", 7, "epoch", (view,), 0, 1, 3, 0).serialize(), **changes}


def test_a_service_state_survives_encoding_and_decoding() -> None:
    assert ServiceState.deserialize(service_state()).serialize() == service_state()


@pytest.mark.parametrize(
    "changes",
    [
        {"revision": "7"},
        {"state": "FINE"},
        {"state": []},
        {"epoch": None},
        {"engines": None},
        {"engines": [{}]},
        {"engines": [{**service_state()["engines"][0], "running": None}]},
        {"adapters": [{"name": "a"}]},
        {"adapters": [{"name": "a", "path": 7}]},
        {"more": 1},
    ],
)
def test_a_service_state_with_a_field_of_a_wrong_type_is_malformed(changes: dict[str, Any]) -> None:
    with pytest.raises(codec.MalformedMessage):
        ServiceState.deserialize(service_state(**changes))


def test_a_failure_is_logged_without_its_text_and_at_a_limited_rate(caplog: pytest.LogCaptureFixture) -> None:
    now, words = 0.0, "the prompt of a user"
    protocol_errors = ProtocolErrors(lambda: now)
    for _ in range(3):
        try:
            int(words)
        except ValueError as failure:
            protocol_errors.add("it could not be handled", failure)
    assert len(caplog.records) == 1
    assert "it could not be handled (1 so far): ValueError" in caplog.text
    assert "test_wire_messages.py" in caplog.text
    assert words not in caplog.text
    now = QUIET_SECONDS
    protocol_errors.add("it could not be handled")
    assert "(4 so far)" in caplog.text
