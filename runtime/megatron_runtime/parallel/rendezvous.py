"""Rendezvous: the ranks of a replica group in a store that its first rank serves, those of a world in torchrun's."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import DistNetworkError, DistStoreError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from megatron_runtime.errors import ConfigurationError, LostRankError
from megatron_runtime.parallel.layout import RankPosition
from megatron_runtime.parallel.store_proxy import LOOPBACK, StoreProxy, authenticated_port

_PAUSE = 0.2
_GRACE = 5.0
"""Seconds that the first rank's timeout may be later than this rank's."""
_MISSING, _NONE = "missing", "none"
_ATTEMPT = 15.0
"""Interval in which a connection is retried. For its log, torch resolves the names of addresses, and a lost answer
takes 5 seconds.
"""


class Rendezvous:
    """A key-value store at ``host`` and ``port``. The first rank opens it, and its lifetime is that of this object.

    Args:
        position: The place of this rank.
        host: Address of the first rank, as all ranks reach it.
        port: Port of the store; on the first rank, 0 chooses one.
        key: Secret of the replica group; a rank with another one is not admitted.
        attempt: Number of this start of the replica group; ranks of another attempt are not joined.

    Raises:
        ConfigurationError: The port can't be listened on.
    """

    def __init__(self, position: RankPosition, host: str, port: int, *, key: str, attempt: int = 0) -> None:
        self._position = position
        self._host = host
        self._key = key
        self._prefix = f"attempt/{attempt}"
        self.port = port
        if position.is_first:
            try:
                listener = _listen(host, port)
            except OSError as error:
                raise _no_port(host, port, error) from None
            self.port = listener.getsockname()[1]
            self._store = _serve_on_loopback()
            self._proxy = StoreProxy(listener, self._store.port, key)

    @property
    def address(self) -> str:
        """``host:port``."""
        return f"{self._host}:{self.port}"

    def connect(self, timeout: float) -> Store:
        """A separate connection for one thread, whose requests fail after ``timeout`` seconds."""
        return self._connect(_ATTEMPT, timeout)

    def await_all(self, timeout: float) -> Store:
        """Wait until every rank has joined. Raises LostRankError with the missing ranks after ``timeout`` seconds."""
        position = self._position
        where = f"{position}: rendezvous at {self.address}"
        barrier = StoreBarrier(position.rank, position.sizes.ranks_per_replica_group, where, timeout)
        store = barrier.reach(lambda patience: self._connect(patience, timeout))
        barrier.await_all(store)
        return store

    def _connect(self, patience: float, timeout: float) -> Store:
        try:
            port = authenticated_port(self._host, self.port, self._key, patience)
        except OSError as error:
            raise DistNetworkError(str(error) or "no answer") from None
        client = _client(LOOPBACK, port, patience)
        client.set_timeout(timedelta(seconds=timeout))
        return PrefixStore(self._prefix, client)


def meet_world(rank: int, size: int, host: str, port: int, *, timeout: float, is_kept: bool) -> Store:
    """The store of a world of ``size`` ranks, once all of them have joined.

    Args:
        rank: This rank.
        size: Number of ranks.
        host: Address of the store.
        port: Port of the store.
        timeout: Seconds within which all ranks have to join.
        is_kept: Whether the store exists independently of rank 0, which opens it otherwise.

    Raises:
        LostRankError: Some ranks, which it names, didn't join.
        ConfigurationError: The port can't be listened on.
    """
    barrier = StoreBarrier(rank, size, f"rank {rank} of the world: rendezvous at {host}:{port}", timeout)
    store: Store
    if rank == 0 and not is_kept:
        try:
            store = TCPStore(host, port, is_master=True, wait_for_workers=False, multi_tenant=True)
        except RuntimeError as error:
            raise _no_port(host, port, error) from None
    else:
        store = barrier.reach(lambda patience: _client(host, port, patience))
    store.set_timeout(timedelta(seconds=timeout))
    barrier.await_all(store)
    return store


class StoreBarrier:
    """One rank's connection to a store, and its wait until all ranks are connected.

    Args:
        rank: This rank.
        ranks: Number of ranks.
        where: Rank and address, the beginning of errors.
        timeout: Seconds from now within which all ranks have to join.
    """

    def __init__(self, rank: int, ranks: int, where: str, timeout: float) -> None:
        self._rank = rank
        self._ranks = ranks
        self._where = where
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout

    def reach(self, connect: Callable[[float], Store]) -> Store:
        """The result of ``connect``, whose argument is its time limit in seconds. It is retried until the timeout."""
        while True:
            left = self._deadline - time.monotonic()
            try:
                return connect(min(max(left, 0.001), _ATTEMPT))
            except RuntimeError as error:
                if left <= _PAUSE:
                    raise LostRankError(
                        f"{self._where}: rank 0 did not answer within {self._timeout:g} s ({_first_line(error)})",
                        missing=[0],
                    ) from None
                time.sleep(_PAUSE)

    def await_all(self, store: Store) -> None:
        """Wait until every rank has joined. Raises LostRankError with the missing ranks after the timeout."""
        if missing := self._read_missing(store) if self._rank else self._count(store):
            named = ", ".join(f"rank {rank}" for rank in missing)
            raise LostRankError(f"{self._where}: {named} did not join within {self._timeout:g} s", missing=missing)

    def _count(self, store: Store) -> list[int]:
        """The first rank waits for the others, publishes which ranks are missing, and keeps the store until they have
        read it.
        """
        others = {rank: _here(rank) for rank in range(1, self._ranks)}
        with contextlib.suppress(DistStoreError):
            store.wait(list(others.values()), _until(self._deadline))
        missing = [rank for rank, key in others.items() if not store.check([key])]
        store.set(_MISSING, ",".join(map(str, missing)) or _NONE)
        if missing:
            time.sleep(_PAUSE)
        return missing

    def _read_missing(self, store: Store) -> list[int]:
        try:
            store.set(_here(self._rank), "")
            store.wait([_MISSING], _until(self._deadline + _GRACE))
            found = store.get(_MISSING).decode()
        except RuntimeError:
            return [0]
        return [] if found == _NONE else [int(rank) for rank in found.split(",")]


def _listen(host: str, port: int) -> socket.socket:
    """Listens only on the host's address, because another replica group may use the same port at another address."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address[:2], family=family, backlog=socket.SOMAXCONN)


def _serve_on_loopback() -> TCPStore:
    listener = _listen(LOOPBACK, 0)
    # The store closes the descriptor when it ends.
    return TCPStore(
        LOOPBACK,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _client(host: str, port: int, patience: float) -> TCPStore:
    """A connection. Raises RuntimeError after this number of seconds."""
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=patience))


def _no_port(host: str, port: int, error: Exception) -> ConfigurationError:
    return ConfigurationError(
        f"rendezvous at {host}:{port}: can't listen there ({_first_line(error)}); choose a free port", field="port"
    )


def _here(rank: int) -> str:
    return f"here/{rank}"


def _until(deadline: float) -> timedelta:
    return timedelta(seconds=max(deadline - time.monotonic(), 0.001))


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
