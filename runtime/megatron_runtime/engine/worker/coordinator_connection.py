"""An engine's connection to the coordinator: registration, heartbeats and reports."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable

from megatron_runtime.engine.worker.loop_requests import LoopRequest
from megatron_runtime.headers import EngineState, Headers
from megatron_runtime.wire.batches import in_batches
from megatron_runtime.wire.bodies import TokenChunk
from megatron_runtime.wire.codec import Message
from megatron_runtime.wire.dealer import Dealer
from megatron_runtime.wire.items import AdapterReport, EngineLoad, Finished, Progress, Registration
from megatron_runtime.wire.protocol_errors import ProtocolErrors
from megatron_runtime.wire.protocol_version import OWN

HEARTBEAT_SECONDS = 1.0
REGISTRATION_SECONDS = 10.0
"""Time for the answer to a registration; then the engine registers again."""


class CoordinatorConnection:
    """Sends only the registration until the coordinator has confirmed it.

    Reports in between are not lost: after a registration the coordinator assigns the engine's requests again, and the
    engine answers with all that the coordinator has missed.

    Args:
        describe: Returns the engine's state, whether it drains, the UUIDs of its requests, its load, the path of the
            last weights that it got from a coordinator, and its adapters.
        on_message: Called with every message except those of the registration.
        on_registering: Called before each registration, after which the coordinator assigns all requests again.
        on_refused: Called with the reason when the coordinator refuses the engine.
    """

    def __init__(
        self,
        address: int | str,
        *,
        replica_group: int,
        attempt: int,
        key: str | None,
        describe: Callable[[], tuple[EngineState, bool, list[bytes], EngineLoad, str, AdapterReport]],
        on_message: Callable[[Message], None],
        on_registering: Callable[[], None],
        on_refused: Callable[[str], None],
    ) -> None:
        self._replica_group = replica_group
        self._attempt = attempt
        self._incarnation = secrets.token_hex(8)
        self._describe = describe
        self._on_message = on_message
        self._on_registering = on_registering
        self._on_refused = on_refused
        self._dealer = Dealer(
            address,
            name=f"mp-coord-{replica_group}-{self._incarnation}".encode(),
            key=key,
            on_message=self._handle,
            on_connected=self._register,
            on_disconnected=self._disconnected,
        )
        self._tasks: list[asyncio.Task[None]] = []
        self._registering_since: float | None = None
        """When the registration was sent that has no answer yet."""
        self.registered = asyncio.Event()
        """Set while the engine is registered over the current connection."""

    @property
    def protocol_errors(self) -> ProtocolErrors:
        """Received messages that were dropped."""
        return self._dealer.protocol_errors

    def open(self) -> None:
        """Start connecting, on the running event loop."""
        loop = asyncio.get_running_loop()
        self._dealer.open(loop)
        self._tasks = [loop.create_task(self._dealer.listen()), loop.create_task(self._send_heartbeats())]

    def close(self) -> None:
        """Close the connection. Messages that were just sent are still delivered."""
        for task in self._tasks:
            task.cancel()
        self._dealer.close()
        self.registered.clear()

    def report_state(self, state: EngineState) -> None:
        """Report the state of the engine."""
        if self.registered.is_set():
            self._dealer.send(Headers.STATE, state.value)

    def report_weights(self, version: int, update: asyncio.Future[int]) -> None:
        """Report the result of an update to this version, when it is done."""

        def report(done: asyncio.Future[int]) -> None:
            if self.registered.is_set() and not done.cancelled():
                error = done.exception()
                self._dealer.send(Headers.WEIGHTS_UPDATED, version, "" if error is None else str(error) or repr(error))

        update.add_done_callback(report)

    def report_adapters(self, version: int, error: str) -> None:
        """Report that the engine has this version of the adapters, or why it keeps another one."""
        if self.registered.is_set():
            self._dealer.send(Headers.ADAPTERS_ASSIGNED, version, error)

    def report_draining(self) -> None:
        """Report that the engine accepts no new requests."""
        if self.registered.is_set():
            self._dealer.send(Headers.DRAIN)

    def send_progress(self, chunks: list[tuple[LoopRequest, int, TokenChunk]]) -> None:
        """Report new tokens: (request, number of the first token, tokens)."""
        if chunks and self.registered.is_set():
            pairs = (
                (Progress(request.uuid, request.dispatch, start, len(chunk.tokens)), chunk.pack())
                for request, start, chunk in chunks
            )
            for progress, bodies in in_batches(pairs):
                self._dealer.send(Headers.ENGINE_REPLY_PARTIAL, progress, bodies=bodies)

    def send_replies(self, requests: list[LoopRequest]) -> None:
        """Report results."""
        if requests and self.registered.is_set():
            pairs = (
                (Finished(request.uuid, request.dispatch), request.reply)
                for request in requests
                if request.reply is not None
            )
            for replies, bodies in in_batches(pairs):
                self._dealer.send(Headers.ENGINE_REPLY, replies, bodies=bodies)

    def ask_for_bodies(self, uuids: list[bytes]) -> None:
        """Ask for the bodies of requests that were assigned without them."""
        if self.registered.is_set():
            self._dealer.send(Headers.BODIES_NEEDED, uuids)

    def send_disconnect(self, reason: str, *, failed: bool) -> None:
        """Deregister the engine; the coordinator assigns its requests to others."""
        self._dealer.send(Headers.DISCONNECT, reason, failed)

    def _handle(self, message: Message) -> None:
        match message.header:
            case Headers.REGISTER_ACK:
                self._registering_since = None
                self.registered.set()
                _, is_draining, *_ = self._describe()
                if is_draining:  # The registration may be older than the drain.
                    self.report_draining()
            case Headers.REGISTER_REFUSED:
                self._registering_since = None
                self.registered.clear()
                self._on_refused(str(message.args[0]) if message.args else "without a reason")
            case Headers.UNKNOWN_PEER:
                self._register_again()
            case Headers.BEAT:
                pass
            case _:
                self._on_message(message)

    def _register(self) -> None:
        """Register the engine with its requests, after each (re-)connection and when the coordinator requests it."""
        self.registered.clear()
        self._on_registering()
        registration = Registration(self._replica_group, self._attempt, self._incarnation, *self._describe())
        self._registering_since = time.monotonic()
        self._dealer.send(Headers.REGISTER, OWN, *registration.wire())

    def _register_again(self) -> None:
        """Unless a registration waits for its answer: the coordinator may still receive messages from before it, and
        would get all requests of the engine once for each of them."""
        since = self._registering_since
        if since is None or time.monotonic() - since > REGISTRATION_SECONDS:
            self._register()

    def _disconnected(self) -> None:
        self._registering_since = None
        self.registered.clear()

    async def _send_heartbeats(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            if self.registered.is_set():
                state, _, _, load, *_ = self._describe()
                self._dealer.send(Headers.HEARTBEAT, state.value, load.wire())
            elif self._registering_since is not None:
                self._register_again()
