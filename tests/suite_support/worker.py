"""Resources of a worker: its number, and ports and addresses that no other worker uses."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import socket
from collections.abc import Iterator, Sequence

FIRST_PORT = 10_000
"""Below the kernel's range for outgoing connections, which could use a free port before its server does."""
PORTS_PER_WORKER = 600
MOST_WORKERS = 16


def worker_number() -> int:
    """The number of this worker; 0 without pytest-xdist."""
    return int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % MOST_WORKERS


def free_port() -> int:
    """A free port on loopback, another one for each call."""
    for port in itertools.islice(_PORTS, PORTS_PER_WORKER):
        if _are_free("127.0.0.1", (port,)):
            return port
    raise AssertionError("no port of this worker is free")


def free_host(ports: Sequence[int]) -> str:
    """A loopback address with these ports free, another one for each call."""
    for last in itertools.islice(_LAST_BYTES, 250):
        host = f"127.{130 + worker_number()}.{os.getpid() % 250 + 1}.{last}"
        if _are_free(host, ports):
            return host
    raise AssertionError("no loopback address of this worker has its ports free")


def _are_free(host: str, ports: Sequence[int]) -> bool:
    with contextlib.ExitStack() as stack:
        try:
            for port in ports:
                stack.enter_context(socket.socket()).bind((host, port))
        except OSError:
            return False
    return True


def _own_ports() -> Iterator[int]:
    """In order, to reuse a port as late as possible; from a random start, because another run may have begun too."""
    first = FIRST_PORT + worker_number() * PORTS_PER_WORKER
    start = random.SystemRandom().randrange(PORTS_PER_WORKER)
    return itertools.cycle([first + (start + step) % PORTS_PER_WORKER for step in range(PORTS_PER_WORKER)])


_PORTS = _own_ports()
_LAST_BYTES = itertools.cycle(range(2, 250))
