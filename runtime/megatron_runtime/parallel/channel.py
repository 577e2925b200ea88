"""Ordered messages from one rank to all others of its replica group.

It uses separate sockets, because gloo's thread and the receiving thread contend for a lock: on a machine whose cores
are all busy, each message would cost some milliseconds.
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
    """The received bytes, and the number that was sent with them."""

    body: bytes
    checksum: int


class Channel:
    """One rank sends, all others receive. A send does not wait for the receivers while the socket buffers have room.

    Opened on all ranks at the same time. Raises OSError or RuntimeError if the ranks don't connect, and later if one of
    them is lost or exceeds the timeout.

    Args:
        store: The store in which the sender publishes its address.
        name: Of this channel.
        position: The place of this rank.
        source: The rank that sends.
        address: Of this machine, as the other ranks reach it.
        timeout: Seconds that another rank may take.
    """

    def __init__(
        self, store: Store, name: str, position: RankPosition, *, source: int, address: str, timeout: float
    ) -> None:
        if position.rank == source:
            others = position.sizes.ranks_per_replica_group - 1
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
        """Close the channel. Messages that were sent still arrive."""
        for end in self.ends:
            end.close()
