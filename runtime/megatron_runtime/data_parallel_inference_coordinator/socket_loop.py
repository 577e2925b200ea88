"""The ROUTER socket of the coordinator: receives and sends in batches."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Callable

import zmq
from zmq.utils.monitor import recv_monitor_message

from megatron_runtime.errors import ConfigurationError
from megatron_runtime.wire import sockets
from megatron_runtime.wire.key_files import withdraw_key
from megatron_runtime.wire.security import require_key_or_loopback, secure_server

logger = logging.getLogger(__name__)

_REFUSALS = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
RECEIVE_BATCH = 512
"""Most messages per call of `receive`: enough to batch under load, few enough not to delay replies."""

# Combined once: send_multipart combines its flags, which are enumerations, for each frame.
_AND_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)


class RouterSocket:
    """A bound ROUTER socket that reports unreachable peers, and that another thread can wake.

    A peer is known by the name that it sends first, across its connections, or else by the ZeroMQ identity of its
    connection.

    Raises:
        ConfigurationError: The host is no loopback address and there is no key, or it can't be bound.
    """

    def __init__(self, host: str, port: int | None, key: str | None) -> None:
        require_key_or_loopback(host, key)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.ROUTER)
        sockets.configure_socket(self.socket)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._connections: dict[bytes, bytes] = {}
        """The ZeroMQ identity of the newest connection of each named peer."""
        self._names: dict[bytes, bytes] = {}
        """The reverse."""
        self._authenticator = secure_server(self._context, self.socket, key) if key is not None else None
        try:
            _bind(self.socket, host, port)
        except BaseException:
            self._close_socket()
            raise
        self.address = self.socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
        if key is None:
            withdraw_key(self.address)
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_sender.setblocking(False)
        self.on_refused: Callable[[], None] = lambda: None
        """Called for each connection whose handshake failed, for example because of a wrong key."""
        self._monitor = self.socket.get_monitor_socket(_REFUSALS)
        self._poller = zmq.Poller()
        self._poller.register(self._monitor, zmq.POLLIN)
        self._poller.register(self.socket, zmq.POLLIN)
        self._poller.register(self._wake_receiver.fileno(), zmq.POLLIN)

    def receive(self, timeout: float, handle: Callable[[bytes, list[bytes]], None]) -> None:
        """Wait up to ``timeout`` seconds for messages, and call ``handle(peer, frames)`` for each."""
        ready = self._poller.poll(max(0, round(timeout * 1000)))
        if not ready:
            return
        if any(source is self._monitor for source, _ in ready):
            self._count_refusals()
        for _ in range(RECEIVE_BATCH):
            try:
                connection, *frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if (name := sockets.name_in(frames)) is not None:
                self._accept_name(connection, name)
            else:
                handle(self._names.get(connection, connection), frames)

    def _accept_name(self, connection: bytes, name: bytes) -> None:
        """A peer may reconnect before its old connection has timed out, so the newest connection counts."""
        self._connections.pop(self._names.pop(connection, b""), None)
        self._names.pop(self._connections.get(name, b""), None)
        self._connections[name], self._names[connection] = connection, name

    def forget_closed(
        self, is_known: Callable[[bytes], bool], probe: list[bytes], failed: Callable[[Exception], None]
    ) -> None:
        """Forget the named peers for which ``is_known`` is false and that the message ``probe`` can't be sent to.

        ``failed`` is called with the error of a peer; it does not keep the others from being forgotten.
        """
        for name in list(self._connections):
            try:
                if not is_known(name):
                    self.send(name, probe)
            except Exception as failure:
                failed(failure)

    def _count_refusals(self) -> None:
        while self._monitor.poll(0):
            recv_monitor_message(self._monitor)
            self.on_refused()

    def send(self, peer: bytes, frames: list[bytes]) -> bool:
        """Send without waiting; False when the peer is disconnected, or its queue is full."""
        connection = self._connections.get(peer, peer)
        try:
            self.socket.send(connection, _AND_MORE)
            for frame in frames[:-1]:
                self.socket.send(frame, _AND_MORE)
            self.socket.send(frames[-1], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            logger.debug("can't send to %r: %s", peer, error)
            if error.errno == zmq.EHOSTUNREACH:
                self._names.pop(self._connections.pop(peer, b""), None)
            return False
        return True

    def wake(self) -> None:
        """End the current or the next `receive`; safe in any thread and in signal handlers."""
        with contextlib.suppress(BlockingIOError):
            self._wake_sender.send(b"\0")

    def close(self) -> None:
        """Close everything. Messages that were just sent are still delivered, for at most half a second."""
        self.socket.setsockopt(zmq.LINGER, 500)
        self.socket.disable_monitor()
        self._monitor.close(linger=0)
        self._close_socket()
        self._wake_receiver.close()
        self._wake_sender.close()

    def _close_socket(self) -> None:
        self.socket.close()
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()


def _bind(router: zmq.Socket[bytes], host: str, port: int | None) -> None:
    """Bind the port, or with a warning any free port if it is in use; peers get the actual address."""
    endpoint = _numeric(host)
    if ":" in endpoint:
        router.setsockopt(zmq.IPV6, 1)
        endpoint = f"[{endpoint}]"
    try:
        router.bind(f"tcp://{endpoint}:{port or '*'}")
    except zmq.ZMQError as error:
        if error.errno != zmq.EADDRINUSE:
            raise _unusable(host, error.strerror) from None
        router.bind(f"tcp://{endpoint}:*")
        logger.warning("port %s of %s is in use; the coordinator listens on another one", port, host)


def _numeric(host: str) -> str:
    """The address of a host name: ZeroMQ binds to addresses only."""
    try:
        return str(socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise _unusable(host, error.strerror) from None


def _unusable(host: str, reason: str | None) -> ConfigurationError:
    return ConfigurationError(
        f"the coordinator can't listen on {host!r}: {reason}; give an address of this machine",
        field="coordinator_host",
    )
