"""Where the ranks of a replica meet: a store that its first rank keeps."""

from __future__ import annotations

import contextlib
import socket
import time
from datetime import timedelta

from torch.distributed import DistStoreError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from megatron_runtime.errors import ConfigurationError, LostRankError
from megatron_runtime.parallel.layout import RankPosition

_PAUSE = 0.2
_GRACE = 5.0
"""Seconds that the first rank may be later than this one in giving up."""
_MISSING, _NOBODY = "missing", "nobody"
_ATTEMPT = 15.0
"""Seconds after which a connection is tried anew. On the way torch asks for the names of addresses, for its log, and
an answer that is lost takes 5."""


class MeetingPlace:
    """A key-value store at ``host`` and ``port``; on the first rank it is opened here, and lives as long as this.

    Args:
        position: Who this is.
        host: Where the first rank is, as seen by all.
        port: Where it listens; on the first rank 0 chooses one.
        attempt: Which try of this replica it is; ranks of another one are not met.

    Raises:
        ConfigurationError: The port can't be listened at.
    """

    def __init__(self, position: RankPosition, host: str, port: int, *, attempt: int = 0) -> None:
        self._position = position
        self._host = host
        self._prefix = f"attempt/{attempt}"
        self._server: TCPStore | None = None
        if position.is_first:
            try:
                self._server = _serve(host, port)
            except (RuntimeError, OSError) as error:
                raise ConfigurationError(
                    f"rendezvous at {host}:{port}: can't listen there ({_first_line(error)}); choose a free port",
                    field="port",
                ) from None
        self.port = port if self._server is None else self._server.port

    @property
    def address(self) -> str:
        """``host:port``."""
        return f"{self._host}:{self.port}"

    def connect(self, timeout: float) -> Store:
        """A connection of its own, for one thread; what it asks for fails after ``timeout`` seconds."""
        return self._connect(_ATTEMPT, timeout)

    def await_all(self, timeout: float) -> Store:
        """Wait until every rank is here; LostRankError names those who aren't after ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        store = self._reach(deadline, timeout)
        missing = self._count(store, deadline) if self._position.is_first else self._hear(store, deadline)
        if missing:
            named = ", ".join(f"rank {rank}" for rank in missing)
            raise LostRankError(
                f"{self._position}: rendezvous at {self.address}: {named} did not come within {timeout:g} s",
                missing=missing,
            )
        return store

    def _count(self, store: Store, deadline: float) -> list[int]:
        """The first rank waits for the others, and says who is missing; it is there a while for them to hear it."""
        others = {rank: _here(rank) for rank in range(1, self._position.sizes.ranks_per_replica)}
        with contextlib.suppress(DistStoreError):
            store.wait(list(others.values()), _until(deadline))
        missing = [rank for rank, key in others.items() if not store.check([key])]
        store.set(_MISSING, ",".join(map(str, missing)) or _NOBODY)
        if missing:
            time.sleep(_PAUSE)
        return missing

    def _hear(self, store: Store, deadline: float) -> list[int]:
        try:
            store.set(_here(self._position.rank), "")
            store.wait([_MISSING], _until(deadline + _GRACE))
            found = store.get(_MISSING).decode()
        except RuntimeError:
            return [0]
        return [] if found == _NOBODY else [int(rank) for rank in found.split(",")]

    def _reach(self, deadline: float, timeout: float) -> Store:
        while True:
            left = deadline - time.monotonic()
            try:
                return self._connect(min(max(left, 0.001), _ATTEMPT), timeout)
            except RuntimeError as error:
                if left <= _PAUSE:
                    raise LostRankError(
                        f"{self._position}: rendezvous at {self.address}: rank 0 did not answer within {timeout:g} s "
                        f"({_first_line(error)})",
                        missing=[0],
                    ) from None
                time.sleep(_PAUSE)

    def _connect(self, patience: float, timeout: float) -> Store:
        limit = timedelta(seconds=patience)
        client = TCPStore(self._host, self.port, is_master=False, wait_for_workers=False, timeout=limit)
        client.set_timeout(timedelta(seconds=timeout))
        return PrefixStore(self._prefix, client)


def _serve(host: str, port: int) -> TCPStore:
    """Listens at the host's address alone: beside it, another replica may have the same port of another address."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.create_server(address[:2], family=family, backlog=socket.SOMAXCONN)
    port = listener.getsockname()[1]
    # The store closes the descriptor when it ends.
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def _here(rank: int) -> str:
    return f"here/{rank}"


def _until(deadline: float) -> timedelta:
    return timedelta(seconds=max(deadline - time.monotonic(), 0.001))


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
