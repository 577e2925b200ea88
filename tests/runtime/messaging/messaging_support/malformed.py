"""Hypothesis strategies for malformed messages of all kinds."""

from __future__ import annotations

import msgpack
from hypothesis import strategies as st

from megatron_runtime.headers import Headers
from megatron_runtime.wire import codec, sockets
from megatron_runtime.wire.items import Finished, Progress

Frames = list[bytes]

SECRET = "the eagle lands at midnight"
"""Stands for a prompt; no log may have it."""

BATCHES = (
    Headers.SUBMIT_REQUEST,
    Headers.ENGINE_REPLY,
    Headers.ENGINE_REPLY_PARTIAL,
    Headers.ABORT_REQUEST,
    Headers.DROP_REQUEST,
    Headers.REPLY_ACK,
    Headers.REQUEST_FAILED,
)
TO_COORDINATOR = {
    Headers.CONNECT: 2,
    Headers.REGISTER: 10,
    Headers.HEARTBEAT: 2,
    Headers.STATE: 1,
    Headers.SERVICE_STATE: 2,
    Headers.UPDATE_WEIGHTS: 3,
    Headers.WEIGHTS_UPDATED: 2,
    Headers.CHANGE_ADAPTERS: 5,
    Headers.ADAPTERS_ASSIGNED: 2,
    Headers.DRAIN: 0,
    Headers.DISCONNECT: 2,
    Headers.SHUTDOWN: 0,
    Headers.PAUSE: 3,
    Headers.UNPAUSE: 3,
    Headers.SUSPEND: 3,
    Headers.RESUME: 3,
    Headers.STOP: 3,
}
"""The messages that the coordinator accepts, except batches, with their number of arguments."""
FROM_COORDINATOR = (
    Headers.CONNECT_ACK,
    Headers.CONNECT_REFUSED,
    Headers.REGISTER_ACK,
    Headers.REGISTER_REFUSED,
    Headers.BEAT,
    Headers.UNKNOWN_PEER,
    Headers.REPLY_ACK,
    Headers.REQUEST_FAILED,
    Headers.SIGNAL_REPLY,
)
"""The messages that the coordinator never accepts."""

nothing = st.sampled_from([None, -1, -(2**63), float("nan"), {}, {SECRET: SECRET}, [[]], [None, SECRET], [SECRET] * 9])
"""Values that are invalid for every field."""
bodies = st.lists(st.sampled_from([b"", b"\xc1", SECRET.encode()]) | st.binary(max_size=12), max_size=3)


def _is_valid(frames: Frames) -> bool:
    if sockets.name_in(frames) is not None:
        return True
    try:
        codec.decode(frames)
    except codec.MalformedMessage:
        return False
    return True


def _header(number: int, args: list[object]) -> bytes:
    packed: bytes = msgpack.packb([number, *args])
    return packed


noise = st.lists(st.binary(max_size=24), min_size=1, max_size=3).filter(lambda frames: not _is_valid(frames))
truncated = st.builds(
    lambda number, args, cut: [_header(number, args)[:-cut]],
    st.integers(0, 100),
    st.lists(nothing, min_size=1, max_size=4),
    st.integers(1, 1000),
).filter(lambda frames: not _is_valid(frames))
unknown_numbers = st.builds(
    lambda number, args, rest: [_header(number, args), *rest],
    st.integers(-(2**63), 2**64 - 1).filter(lambda number: number not in set(Headers)),
    st.lists(nothing, max_size=3),
    bodies,
)
no_headers = st.builds(lambda content: [msgpack.packb(content)], nothing | st.text(max_size=8) | st.booleans())


def wrong_arguments(counts: dict[Headers, int]) -> st.SearchStrategy[Frames]:
    """Values of other types, or an unexpected body."""
    return st.sampled_from(sorted(counts)).flatmap(
        lambda header: st.builds(
            lambda args, rest: [_header(header, args), *(rest or ([b"x"] if not args else []))],
            st.lists(nothing, min_size=counts[header], max_size=counts[header]),
            bodies,
        )
    )


def wrong_counts(headers: tuple[Headers, ...]) -> st.SearchStrategy[Frames]:
    """A wrong number of arguments."""
    return st.builds(
        lambda header, args: [_header(header, args)],
        st.sampled_from(headers),
        st.lists(nothing, min_size=8, max_size=9),
    )


def wrong_batches(headers: tuple[Headers, ...]) -> st.SearchStrategy[Frames]:
    """Invalid items, and wrong numbers of bodies."""
    return st.builds(
        lambda header, items, rest: [_header(header, [items]), *rest],
        st.sampled_from(headers),
        st.lists(nothing, min_size=1, max_size=3) | nothing.filter(lambda value: value is not None),
        bodies,
    )


unknown_replies = st.builds(
    lambda uuid, dispatch, body: codec.encode(Headers.ENGINE_REPLY, [Finished(uuid, dispatch)], bodies=[body]),
    st.binary(min_size=16, max_size=16),
    st.integers(0, 9),
    st.binary(max_size=12),
) | st.builds(
    lambda uuid, start, body: codec.encode(Headers.ENGINE_REPLY_PARTIAL, [Progress(uuid, 1, start, 3)], bodies=[body]),
    st.binary(min_size=16, max_size=16),
    st.integers(0, 9),
    st.binary(max_size=12),
)
"""Valid answers to requests that do not exist."""

everything = st.one_of(
    noise,
    truncated,
    unknown_numbers,
    no_headers,
    wrong_arguments(TO_COORDINATOR),
    wrong_counts((*TO_COORDINATOR, *BATCHES)),
    wrong_counts(FROM_COORDINATOR),
    wrong_batches(BATCHES),
    unknown_replies,
)
"""Messages that a coordinator must drop."""
answers = st.one_of(
    noise,
    truncated,
    unknown_numbers,
    no_headers,
    wrong_counts((Headers.CONNECT_ACK, Headers.SIGNAL_REPLY, Headers.SERVICE_STATE, Headers.CONNECT, *BATCHES)),
    wrong_batches((Headers.SUBMIT_REQUEST, Headers.ABORT_REQUEST, Headers.ENGINE_REPLY, Headers.REQUEST_FAILED)),
)
"""Messages that clients and engines must drop."""
