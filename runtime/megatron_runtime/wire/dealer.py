"""The socket of a client or an engine to the coordinator. It reconnects automatically."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, cast

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from megatron_runtime.headers import Headers
from megatron_runtime.wire import codec, sockets
from megatron_runtime.wire.key_files import find_key
from megatron_runtime.wire.protocol_errors import ProtocolErrors
from megatron_runtime.wire.security import coordinator_address, is_loopback, require_key_or_loopback, secure_client

logger = logging.getLogger(__name__)

_LINGER_MILLISECONDS = 500
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH


class Dealer:
    """A DEALER socket on the running event loop.

    Args:
        address: A port of this machine, ``host:port`` or ``tcp://host:port``.
        name: Names the peer to the coordinator across its connections, unique among all peers.
        key: The coordinator's shared secret. None: what `find_key` finds, or else plain sockets, on loopback only.
        on_message: Called with every valid message.
        on_connected: Called after every (re-)connection; the coordinator may be another process.
        on_disconnected: Called when the connection is lost.

    Raises:
        ConfigurationError: The address is invalid, or needs a key.
    """

    def __init__(
        self,
        address: int | str,
        *,
        name: bytes,
        key: str | None,
        on_message: Callable[[codec.Message], None],
        on_connected: Callable[[], None],
        on_disconnected: Callable[[], None],
    ) -> None:
        self.address = coordinator_address(address)
        host = self.address.removeprefix("tcp://").rpartition(":")[0]
        key = key if key is not None else find_key(self.address)
        require_key_or_loopback(host, key)
        self._name = name
        self._has_sent_name = False
        self._key = key
        self._ipv6 = host.startswith("[") or not is_loopback(host)
        self._on_message = on_message
        self._on_connected = on_connected
        self._on_disconnected = on_disconnected
        self._watcher: asyncio.Task[None] | None = None
        self._monitor: Any = None
        self.protocol_errors = ProtocolErrors(time.monotonic)
        """Received messages that were dropped."""
        self.context: zmq.asyncio.Context | None = None
        self.socket: zmq.asyncio.Socket | None = None
        self.connected = False
        self.refused_by_key = False
        """The coordinator rejected the key at the last attempt."""

    def create_socket(self) -> None:
        """Create the socket, unless that was done; `open` connects it."""
        if self.socket is not None:
            return
        self.context = zmq.asyncio.Context()
        self.socket = self.context.socket(zmq.DEALER)
        sockets.configure_dealer(self.socket)
        if self._ipv6:
            self.socket.setsockopt(zmq.IPV6, 1)
        if self._key is not None:
            secure_client(self.socket, self._key)

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start connecting on this loop; `listen` receives."""
        self.create_socket()
        assert self.socket is not None
        self._monitor = self.socket.get_monitor_socket(_EVENTS)
        self._watcher = loop.create_task(self._watch(self._monitor))
        self.socket.connect(self.address)

    def send(self, header: Headers, *args: Any, bodies: list[bytes] | None = None) -> bool:
        """Send without waiting. False when there is no connection or the queue is full: send again when connected."""
        if self.socket is None or not self.connected:
            return False
        if not self._has_sent_name:
            self._has_sent_name = self._send([sockets.name_frame(self._name)])
        return self._has_sent_name and self._send(codec.encode(header, *args, bodies=bodies or ()))

    def _send(self, frames: list[bytes]) -> bool:
        assert self.socket is not None
        sent: asyncio.Future[Any] = cast(Any, self.socket.send_multipart(frames, zmq.NOBLOCK))
        return sent.exception() is None

    def close(self) -> None:
        """Close the socket, which ends `listen`. Messages that were just sent are still delivered over a connection."""
        if self._watcher is not None:
            self._watcher.cancel()
        if self.socket is not None and self.context is not None:
            if self._monitor is not None:
                self.socket.disable_monitor()
                self._monitor.close(linger=0)
            self.socket.close(linger=_LINGER_MILLISECONDS if self.connected else 0)
            self.context.term()
        self.socket = self.context = self._monitor = self._watcher = None
        self.connected = False

    async def listen(self) -> None:
        """Receive messages of the open socket until cancelled."""
        socket = self.socket
        assert socket is not None, "open the socket before listening"
        while True:
            frames = await socket.recv_multipart()
            try:
                self._on_message(codec.decode(frames))
            except codec.MalformedMessage as defect:
                self.protocol_errors.add(f"from the coordinator: {defect}")
            except Exception as failure:
                self.protocol_errors.add("from the coordinator: it could not be handled", failure)
            # Receiving does not yield while messages are queued: many of them must not starve other tasks.
            await asyncio.sleep(0)

    async def _watch(self, monitor: Any) -> None:
        while True:
            event = (await recv_monitor_message(monitor))["event"]
            try:
                self._note(event)
            except Exception:
                logger.exception("a change of the connection to the coordinator could not be handled")

    def _note(self, event: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.connected, self.refused_by_key, self._has_sent_name = True, False, False
            self._on_connected()
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self.refused_by_key = True
        elif self.connected:
            self.connected = False
            self._on_disconnected()
