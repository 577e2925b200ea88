"""Messages from one rank to all others of its replica, in order."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

FRAME = 4096
"""Bytes that go out at first; what a message has beyond them follows in a second piece."""
_HEADER = struct.Struct("=QQ")


@dataclass(frozen=True)
class Message:
    """What came, and the number that was sent with it."""

    body: bytes
    checksum: int


class Channel:
    """Point to point over a gloo group, so that nobody waits before it has to: the sender has a few messages under way.

    Args:
        group: Of the ranks.
        source: The one that sends, counted in torch's world.
        others: The ones that receive, likewise.
        tag: This channel's own; the next number is its own too.
        depth: Messages that may be under way.
    """

    def __init__(self, group: dist.ProcessGroup, source: int, others: list[int], *, tag: int, depth: int) -> None:
        self._group = group
        self._source = source
        self._others = others
        self._tag = tag
        self._depth = depth
        self._under_way: deque[tuple[dist.Work, Tensor]] = deque()

    def send(self, body: bytes, checksum: int = 0) -> None:
        """Send to all others; waits for the oldest of ``depth`` messages if there are more."""
        first = bytearray(FRAME)
        _HEADER.pack_into(first, 0, len(body), checksum)
        room = FRAME - _HEADER.size
        first[_HEADER.size : _HEADER.size + min(room, len(body))] = body[:room]
        self._isend(first, self._tag)
        if len(body) > room:
            self._isend(bytearray(body[room:]), self._tag + 1)
        self.flush(2 * self._depth * len(self._others))

    def expect(self) -> Callable[[], Message]:
        """Begin to receive the next message; what is returned waits for it."""
        frame = torch.empty(FRAME, dtype=torch.uint8)
        work = _posted(dist.irecv(frame, self._source, self._group, self._tag))

        def wait() -> Message:
            work.wait()
            first = frame.numpy().tobytes()
            length, checksum = _HEADER.unpack_from(first)
            room = FRAME - _HEADER.size
            body = first[_HEADER.size : _HEADER.size + min(room, length)]
            if length > room:
                rest = torch.empty(length - room, dtype=torch.uint8)
                _posted(dist.irecv(rest, self._source, self._group, self._tag + 1)).wait()
                body += rest.numpy().tobytes()
            return Message(body, checksum)

        return wait

    def flush(self, left: int = 0) -> None:
        """Wait until no more than ``left`` pieces are under way."""
        while len(self._under_way) > left:
            self._under_way.popleft()[0].wait()

    def _isend(self, content: bytearray, tag: int) -> None:
        piece = torch.frombuffer(content, dtype=torch.uint8)
        for rank in self._others:
            self._under_way.append((_posted(dist.isend(piece, rank, self._group, tag)), piece))


def _posted(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank belongs to the group"
    return work
