"""Messages from one rank to all others of its replica, in order.

Over sockets of our own: gloo's thread and the one that receives meet at a lock, and where every core computes, each
message costs the processor some milliseconds.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from torch.distributed import Store  # type: ignore[attr-defined]

from megatron_runtime.parallel.connections import Listener, break_when_silent, connect, read
from megatron_runtime.parallel.layout import RankPosition

_HEADER = struct.Struct("=QQ")


@dataclass(frozen=True)
class OutcomeMessage:
    """What came, and the number that was sent with it."""

    body: bytes
    checksum: int


class Channel:
    """One rank sends, all others receive. What the system's buffers hold is sent without waiting for the receivers.

    Opened on all ranks at once; OSError or RuntimeError when they don't come together, later when one is gone or later
    than the timeout.

    Args:
        store: Where the sender leaves its address.
        name: Of this channel.
        position: Who this is.
        source: The rank that sends.
        address: Of this machine, as the other ranks see it.
        timeout: Seconds that another rank may take.
    """

    def __init__(
        self, store: Store, name: str, position: RankPosition, *, source: int, address: str, timeout: float
    ) -> None:
        if position.rank == source:
            others = position.sizes.ranks_per_replica - 1
            self.ends = list(Listener(store, name, address, timeout).accept(others).values())
        else:
            self.ends = [connect(store, name, position.rank, timeout)]
        for end in self.ends:
            break_when_silent(end)

    def send(self, body: bytes, checksum: int = 0) -> None:
        """Send to all others."""
        message = _HEADER.pack(len(body), checksum) + body
        for end in self.ends:
            end.sendall(message)

    def receive(self) -> OutcomeMessage:
        """The next message."""
        length, checksum = _HEADER.unpack(read(self.ends[0], _HEADER.size))
        return OutcomeMessage(read(self.ends[0], length), checksum)

    def close(self) -> None:
        """What was sent still arrives."""
        for end in self.ends:
            end.close()
