"""One address that forwards to the selected pod, like a Service."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Self


class MovingAddress:
    """Forwards connections to ``target``, (host, port); existing connections are kept."""

    def __init__(self, host: str, port: int) -> None:
        self.target: tuple[str, int] | None = None
        self.address = host, port
        self._listener = socket.create_server(self.address)
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                here, _ = self._listener.accept()
                try:
                    there = socket.create_connection(self.target) if self.target is not None else None
                except OSError:
                    there = None
                if there is None:
                    here.close()
                    continue
                threading.Thread(target=_join, args=(here, there), daemon=True).start()


def _join(here: socket.socket, there: socket.socket) -> None:
    """Until one end closes."""
    with here, there:
        back = threading.Thread(target=_pump, args=(there, here), daemon=True)
        back.start()
        _pump(here, there)
        back.join()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    for end in (source, sink):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
