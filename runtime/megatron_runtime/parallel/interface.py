"""The network interface of this machine that leads to another machine.

By default gloo and NCCL use the address that the machine's own name resolves to, which may be missing or unreachable
from other machines.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct

_SIOCGIFADDR = 0x8915
_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def use_interface_towards(host: str) -> None:
    """Let gloo and NCCL use the interface through which ``host`` is reached, unless the environment selects one."""
    name = interface_of(address_towards(host))
    for variable in _VARIABLES:
        if name is not None:
            os.environ.setdefault(variable, name)


def address_towards(host: str) -> str | None:
    """The address of this machine in connections to ``host``; None without a route."""
    try:
        found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, _, _, place in found:
        with socket.socket(family, kind) as probe:
            try:
                probe.connect(place)  # connect() on a datagram socket sends nothing
            except OSError:
                continue
            return str(probe.getsockname()[0])
    return None


def interface_of(address: str | None) -> str | None:
    """The name of the interface with this IPv4 address."""
    if address is None:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
