"""All ranks of a world over all replica groups, independent of the caller's operations in torch's own group."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from concurrent.futures import Future
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from megatron_runtime.errors import LostRankError
from megatron_runtime.parallel.connections import Listener, break_when_silent, connect, read
from megatron_runtime.parallel.interface import address_towards
from megatron_runtime.parallel.timeouts import LOAD_TIMEOUT, RENDEZVOUS_TIMEOUT
from megatron_runtime.parallel.world import World

_END = b"."


class WorldGroup:
    """Created on all ranks of the world; does nothing in a world of one. Raises LostRankError with the missing ranks.

    Each other rank has a connection to rank 0, whose end shows that a process has ended.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._meeting: dist.ProcessGroup | None = None
        self._others: list[socket.socket] = []
        self._primary: socket.socket | None = None
        if world.size > 1:
            place = world.meet("the start", LOAD_TIMEOUT)
            self._meeting = dist.new_group(backend="gloo")
            self._connect(place)

    def meet(self, occasion: str, timeout: float) -> None:
        """Wait until all ranks have called this. Raises LostRankError after ``timeout`` seconds; on rank 0 it names
        them.
        """
        if self._meeting is None:
            return
        try:
            dist.monitored_barrier(self._meeting, timedelta(seconds=timeout), wait_all_ranks=True)
        except RuntimeError as error:
            raise LostRankError(
                f"rank {self._world.rank} of the world, at {occasion}, for up to {timeout:g} s: {error}"
            ) from error

    def await_primary(self) -> Future[None]:
        """Completes when rank 0 has announced the end. Raises LostRankError when rank 0 is lost. For other ranks."""
        end: Future[None] = Future()
        end.set_running_or_notify_cancel()  # A future that is running can't be cancelled by those that wait for it.
        threading.Thread(target=self._await_primary, args=(end,), name="primary-watch", daemon=True).start()
        return end

    def release_followers(self) -> None:
        """On rank 0: announce the end to the other ranks."""
        for other in self._others:
            with contextlib.suppress(OSError), other:
                other.sendall(_END)

    def _connect(self, place: Store) -> None:
        if self._world.is_primary:
            towards = os.environ.get("MASTER_ADDR", "127.0.0.1")
            listener = Listener(place, "primary", address_towards(towards) or towards, RENDEZVOUS_TIMEOUT)
            self._others = list(listener.accept(self._world.size - 1).values())
        else:
            self._primary = connect(place, "primary", self._world.rank, RENDEZVOUS_TIMEOUT)
            self._primary.settimeout(None)
            break_when_silent(self._primary)

    def _await_primary(self, end: Future[None]) -> None:
        assert self._primary is not None
        try:
            with self._primary:
                read(self._primary, len(_END))
        except OSError as error:
            end.set_exception(LostRankError(f"rank 0 of the world, which has the coordinator, is lost ({error})"))
            return
        end.set_result(None)
