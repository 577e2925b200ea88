"""Loopback addresses: one for each pod and Service, with their ports free."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterable

ATTEMPTS = 64


class NoAddressError(Exception):
    """No loopback address has the ports free; ``str()`` names the port and the fix."""


class LoopbackAddresses:
    """Allocates addresses in 127.0.0.0/8, so that two pods never share one."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def take(self, ports: Iterable[int], prefer: str | None = None) -> str:
        """An address with all of the ports free. Raises NoAddressError."""
        wanted = sorted(set(ports))
        candidates = [prefer] if prefer else []
        candidates += [_random_address() for _ in range(ATTEMPTS)]
        busy: int | None = None
        for address in candidates:
            if address in self._taken:
                continue
            busy = _first_busy_port(address, wanted)
            if busy is None:
                self._taken.add(address)
                return address
        raise NoAddressError(
            f"port {busy} is taken on every loopback address: a process listens on 0.0.0.0:{busy} or [::]:{busy}; "
            "end it (find it with `ss -ltnp`)"
        )

    def give_back(self, address: str) -> None:
        """Release the address. An address that was never taken is fine."""
        self._taken.discard(address)


def _random_address() -> str:
    # 127.64.0.0/10 and up: resolvers and distributions use addresses in 127.0.0.0/16.
    return f"127.{64 + secrets.randbelow(64)}.{secrets.randbelow(256)}.{1 + secrets.randbelow(254)}"


def _first_busy_port(address: str, ports: Iterable[int]) -> int | None:
    for port in ports:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, port))
                probe.listen()
            except OSError:
                return port
    return None
