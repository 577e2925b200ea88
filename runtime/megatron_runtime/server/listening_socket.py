"""Sockets that are bound before a server uses them."""

from __future__ import annotations

import errno
import socket

from megatron_runtime.errors import ConfigurationError

BACKLOG = 2048


def bind(host: str, port: int | None, usual: int, *, flag: str, may_move: bool) -> socket.socket:
    """A listening socket on ``host``.

    Args:
        port: The requested port; 0 for any free one, None for ``usual``.
        may_move: Whether any free port is used when ``usual`` is in use.

    Raises:
        ConfigurationError: The address or port can't be used; the message names ``flag``.
    """
    wanted = usual if port is None else port
    try:
        return _listen(host, wanted)
    except OSError as error:
        if error.errno == errno.EADDRINUSE and port is None and may_move:
            return _listen(host, 0)
        if error.errno == errno.EADDRINUSE:
            message = f"{flag} {wanted}: already in use on {host}; choose another port, or 0 for any free one"
        else:
            message = f"{flag} {wanted}: can't listen on {host}: {error.strerror or error}"
        raise ConfigurationError(message) from error


def _listen(host: str, port: int) -> socket.socket:
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock
