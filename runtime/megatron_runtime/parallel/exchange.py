"""All-to-all exchange of tensors of equal size between some ranks, on a CPU.

It uses separate sockets, for the reason given in `channel`: ranks synchronize twice in every layer.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time

import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from megatron_runtime.parallel.connections import Listener, connect, received


class Exchange:
    """An exchange between consecutive ranks. Opened on all of them at the same time; errors are those of a `Channel`.

    Args:
        store: The store in which each rank publishes its address.
        name: Of this exchange.
        rank: This rank's number.
        peers: The numbers of all ranks of the exchange.
        address: Of this machine, as the other ranks reach it.
        timeout: Seconds that another rank may take.
    """

    def __init__(self, store: Store, name: str, rank: int, peers: range, *, address: str, timeout: float) -> None:
        self._timeout = timeout
        self._rank = rank
        self._peers = peers
        listener = Listener(store, f"{name}/{rank}", address, timeout)
        below, above = range(peers.start, rank), range(rank + 1, peers.stop)
        self._ends = {other: connect(store, f"{name}/{other}", rank, timeout) for other in below}
        self._ends |= listener.accept(len(above))
        for end in self._ends.values():
            end.setblocking(False)

    def parts(self, mine: Tensor) -> list[Tensor]:
        """The tensors of all ranks, in order of the ranks. ``mine`` is not written to."""
        mine = mine.contiguous()
        parts = {rank: mine if rank == self._rank else torch.empty_like(mine) for rank in self._peers}
        outgoing = dict.fromkeys(self._ends.values(), _bytes(mine))
        incoming = {end: _bytes(parts[rank]) for rank, end in self._ends.items()}
        deadline = time.monotonic() + self._timeout
        while outgoing or incoming:
            if not _advance(outgoing, incoming):
                _wait(outgoing, incoming, deadline)
        return list(parts.values())

    def close(self) -> None:
        """Close the connections. Tensors that were sent still arrive."""
        for end in self._ends.values():
            end.close()


Traffic = dict[socket.socket, memoryview]
"""Remaining bytes to send or to receive, by connection."""


def _advance(outgoing: Traffic, incoming: Traffic) -> bool:
    """Send and receive without waiting. Returns whether there was progress."""
    advanced = False
    for traffic, is_sent in ((outgoing, True), (incoming, False)):
        for end, left in list(traffic.items()):
            with contextlib.suppress(BlockingIOError):
                count = end.send(left) if is_sent else received(end.recv_into(left))
                advanced = True
                if count == len(left):
                    del traffic[end]
                else:
                    traffic[end] = left[count:]
    return advanced


def _wait(outgoing: Traffic, incoming: Traffic, deadline: float) -> None:
    poll, left = select.poll(), deadline - time.monotonic()
    for end in outgoing | incoming:
        poll.register(end, (select.POLLOUT if end in outgoing else 0) | (select.POLLIN if end in incoming else 0))
    if left <= 0 or not poll.poll(left * 1000):
        raise TimeoutError("timed out")


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data
