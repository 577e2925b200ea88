"""Frames on the coordinator's socket: one small msgpack header, then body frames that only clients and engines decode.

A message is ``[header, body...]``. The header is a msgpack list ``[Headers number, arguments...]``; the coordinator
routes on it alone. Messages that carry requests or replies hold a batch: their first argument is a list of items, and
there is exactly one body frame for each of them. What an item looks like is in `items`, a body in `bodies`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from megatron_runtime.headers import Headers

MAX_HEADER_BYTES = 4 * 2**20
MAX_BODY_BYTES = 64 * 2**20
MAX_BATCH = 1024
"""Most items, and therefore body frames, of one message."""

_HEADERS = {int(header): header for header in Headers}
_DECODING_FAILURES = (ValueError, TypeError, msgpack.UnpackException, UnicodeDecodeError, RecursionError)


class MalformedMessage(Exception):
    """A received message is invalid; the text names the defect and never repeats the content."""


@dataclass(slots=True)
class Message:
    """One decoded message."""

    header: Headers
    args: list[Any]
    bodies: Sequence[bytes]


def encode(header: Headers, *args: Any, bodies: Sequence[bytes] = ()) -> list[bytes]:
    """The frames of one message."""
    return [msgpack.packb([int(header), *args], use_bin_type=True), *bodies]


def decode(frames: Sequence[bytes]) -> Message:
    """The message in these frames.

    Raises:
        MalformedMessage: The frames are no valid message.
    """
    if not frames or not frames[0]:
        raise MalformedMessage("empty header frame")
    if len(frames[0]) > MAX_HEADER_BYTES:
        raise MalformedMessage("oversized header frame")
    if len(frames) > MAX_BATCH + 1:
        raise MalformedMessage("too many frames")
    try:
        parts = msgpack.unpackb(frames[0], raw=False)
    except _DECODING_FAILURES:
        raise MalformedMessage("undecodable header frame") from None
    if not isinstance(parts, list) or not parts or type(parts[0]) is not int:
        raise MalformedMessage("header frame is not a list that starts with a number")
    header = _HEADERS.get(parts[0])
    if header is None:
        raise MalformedMessage("unknown header number")
    return Message(header, parts[1:], frames[1:])


def pack_body(content: Any) -> bytes:
    """A body frame.

    Raises:
        ValueError: It would be larger than MAX_BODY_BYTES.
    """
    body: bytes = msgpack.packb(content, use_bin_type=True)
    if len(body) > MAX_BODY_BYTES:
        raise ValueError(f"the message has {len(body)} bytes; the limit is {MAX_BODY_BYTES}")
    return body


def unpack_body(body: bytes) -> Any:
    """The content of a body frame.

    Raises:
        MalformedMessage: Not msgpack, or too large.
    """
    if len(body) > MAX_BODY_BYTES:
        raise MalformedMessage("oversized body frame")
    try:
        return msgpack.unpackb(body, raw=False)
    except _DECODING_FAILURES:
        raise MalformedMessage("undecodable body frame") from None


def is_list_of_integers(value: Any) -> bool:
    """Whether it is one; fast for lists of thousands."""
    return isinstance(value, list) and set(map(type, value)) <= {int}
