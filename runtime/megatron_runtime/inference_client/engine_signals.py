"""The signals of a client that move the service along the edges of its lifecycle."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable

from megatron_runtime.headers import Headers


class EngineSignals(ABC):
    """A method for each signal; the client sends it."""

    @abstractmethod
    def _send_signal_to_engines(self, signal: Headers, timeout: float | None = None) -> Awaitable[None]:
        """Send a signal now; the awaitable ends when all engines have carried it out."""

    def pause_engines(self, timeout: float | None = None) -> Awaitable[None]:
        """RUNNING -> PAUSED: engines stop computing and keep their requests; new requests queue.

        Like the other signals it is sent at once, and returns an awaitable that is done when all registered engines
        have reached the state. A signal that is possible once the signals before it are carried out waits for them.

        Raises:
            InvalidStateError: (from the awaitable) the state of the service doesn't allow it.
            TransitionTimeoutError: (from the awaitable) names the engines that are missing.
            CoordinatorError: (from the awaitable) the coordinator can't be reached.
        """
        return self._send_signal_to_engines(Headers.PAUSE, timeout)

    def unpause_engines(self, timeout: float | None = None) -> Awaitable[None]:
        """PAUSED -> RUNNING; otherwise as `pause_engines`."""
        return self._send_signal_to_engines(Headers.UNPAUSE, timeout)

    def suspend_engines(self, timeout: float | None = None) -> Awaitable[None]:
        """PAUSED -> SUSPENDED: engines release memory; otherwise as `pause_engines`.

        A running service is paused first, unless the client has ``strict_signals``.
        """
        return self._send_signal_to_engines(Headers.SUSPEND, timeout)

    def resume_engines(self, timeout: float | None = None) -> Awaitable[None]:
        """SUSPENDED -> PAUSED: engines allocate their memory again; otherwise as `pause_engines`.

        After a suspension that paused a running service it goes on to RUNNING, unless the client has
        ``strict_signals``.
        """
        return self._send_signal_to_engines(Headers.RESUME, timeout)

    def stop_engines(self, timeout: float | None = None) -> Awaitable[None]:
        """PAUSED or SUSPENDED -> stopped: unfinished requests are aborted; otherwise as `pause_engines`.

        A running service is paused first, unless the client has ``strict_signals``.
        """
        return self._send_signal_to_engines(Headers.STOP, timeout)
