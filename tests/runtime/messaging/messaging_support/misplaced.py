"""Hypothesis strategies for valid messages that their sender may not send."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from messaging_support.malformed import SECRET, Frames, unknown_replies

from megatron_runtime.headers import Headers
from megatron_runtime.lifecycle import SIGNALS
from megatron_runtime.wire import codec
from megatron_runtime.wire.items import AdapterReport, EngineLoad, Submission
from megatron_runtime.wire.protocol_version import OWN

uuids = st.binary(min_size=16, max_size=16)
numbers = st.integers(0, 9)


def _messages(header: Headers, *args: Any) -> st.SearchStrategy[Frames]:
    strategies = [arg if isinstance(arg, st.SearchStrategy) else st.just(arg) for arg in args]
    return st.builds(codec.encode, st.just(header), *strategies)


def _submission(uuid: bytes, *, streaming: bool) -> Frames:
    return codec.encode(Headers.SUBMIT_REQUEST, [Submission(uuid, streaming, 0, [])], bodies=[SECRET.encode()])


of_clients = st.one_of(
    st.builds(_submission, uuids, streaming=st.booleans()),
    _messages(Headers.ABORT_REQUEST, st.lists(uuids, max_size=3)),
    _messages(Headers.DROP_REQUEST, st.lists(uuids, max_size=3)),
    *(_messages(header, numbers, 5.0, st.booleans()) for header in sorted(SIGNALS.values())),
    _messages(Headers.SET_GENERATION_EPOCH, numbers, 5.0, numbers),
    _messages(Headers.INCREMENT_STALENESS, numbers, 5.0),
    _messages(Headers.RESET_PREFIX_CACHE, numbers, 5.0),
    _messages(Headers.START_CUDA_PROFILER, numbers, 5.0),
    _messages(Headers.UPDATE_WEIGHTS, numbers, 5.0, SECRET),
    _messages(Headers.CHANGE_ADAPTERS, numbers, 5.0, "a", SECRET, st.booleans()),
    _messages(Headers.SERVICE_STATE, numbers, st.booleans()),
    _messages(Headers.SHUTDOWN),
)
"""Messages that only a connected client may send."""
of_engines = st.one_of(
    unknown_replies,
    _messages(Headers.BODIES_NEEDED, st.lists(uuids, max_size=3)),
    _messages(Headers.STATE, st.sampled_from(["RUNNING", "PAUSED", "STOPPED"])),
    _messages(Headers.WEIGHTS_UPDATED, numbers, ""),
    _messages(Headers.ADAPTERS_ASSIGNED, numbers, ""),
    _messages(Headers.DRAIN),
)
"""Messages that only a registered engine may send."""
registrations = _messages(
    Headers.REGISTER, OWN, numbers, numbers, "x", "RUNNING", True, [], EngineLoad(), "", AdapterReport()
)
connections = _messages(Headers.CONNECT, OWN, numbers)
