"""An engine's end of the connection to the coordinator: registration, heartbeats, and everything that is reported."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable

from megatron_runtime.engine.worker.loop_requests import LoopRequest
from megatron_runtime.headers import EngineState, Headers
from megatron_runtime.wire.bodies import TokenChunk
from megatron_runtime.wire.codec import Message
from megatron_runtime.wire.dealer import Dealer
from megatron_runtime.wire.items import EngineLoad, Finished, Progress, Registration
from megatron_runtime.wire.protocol_errors import ProtocolErrors

HEARTBEAT_SECONDS = 1.0


class CoordinatorConnection:
    """Sends nothing but the registration until the coordinator has confirmed it.

    What is not sent is not lost: after a registration the coordinator hands out again what this engine holds, and is
    answered with what it missed.

    Args:
        describe: What to tell about the engine: its state, whether it drains, the UUIDs that it holds, its load, and
            the path of the weights that a coordinator gave it last.
        on_message: Called with every message but those of the registration.
        on_refused: Called with the reason when the coordinator doesn't want this engine.
    """

    def __init__(
        self,
        address: int | str,
        *,
        replica_group: int,
        attempt: int,
        key: str | None,
        describe: Callable[[], tuple[EngineState, bool, list[bytes], EngineLoad, str]],
        on_message: Callable[[Message], None],
        on_refused: Callable[[str], None],
    ) -> None:
        self._replica_group = replica_group
        self._attempt = attempt
        self._incarnation = secrets.token_hex(8)
        self._describe = describe
        self._on_message = on_message
        self._on_refused = on_refused
        self._dealer = Dealer(
            address,
            identity=f"mp-coord-{replica_group}-{self._incarnation}".encode(),
            key=key,
            on_message=self._take,
            on_connected=self._register,
            on_disconnected=self._disconnected,
        )
        self._heartbeats: asyncio.Task[None] | None = None
        self.registered = asyncio.Event()
        """Set while the coordinator knows this engine over the connection that there is now."""

    @property
    def protocol_errors(self) -> ProtocolErrors:
        """What arrived and was dropped."""
        return self._dealer.protocol_errors

    def open(self) -> None:
        """Start connecting, on the running loop."""
        loop = asyncio.get_running_loop()
        self._dealer.open(loop)
        self._heartbeats = loop.create_task(self._send_heartbeats())

    def close(self) -> None:
        """Close the connection; what was just sent still goes out."""
        if self._heartbeats is not None:
            self._heartbeats.cancel()
        self._dealer.close()
        self.registered.clear()

    def tell_state(self, state: EngineState) -> None:
        """Report a state that was reached."""
        if self.registered.is_set():
            self._dealer.send(Headers.STATE, state.value)

    def tell_weights(self, version: int, update: asyncio.Future[int]) -> None:
        """Report what becomes of an update to this version, once that is known."""

        def tell(done: asyncio.Future[int]) -> None:
            if self.registered.is_set() and not done.cancelled():
                error = done.exception()
                self._dealer.send(Headers.WEIGHTS_UPDATED, version, "" if error is None else str(error) or repr(error))

        update.add_done_callback(tell)

    def tell_draining(self) -> None:
        """Ask for no new requests."""
        if self.registered.is_set():
            self._dealer.send(Headers.DRAIN)

    def send_progress(self, news: list[tuple[LoopRequest, int, TokenChunk]]) -> None:
        """Report new tokens: (request, number of the first token, tokens)."""
        if news and self.registered.is_set():
            progress = [
                Progress(request.uuid, request.dispatch, start, len(chunk.tokens)) for request, start, chunk in news
            ]
            bodies = [chunk.pack() for _, _, chunk in news]
            self._dealer.send(Headers.ENGINE_REPLY_PARTIAL, progress, bodies=bodies)

    def send_replies(self, requests: list[LoopRequest]) -> None:
        """Report results."""
        if requests and self.registered.is_set():
            replies = [Finished(request.uuid, request.dispatch) for request in requests]
            bodies = [request.reply for request in requests if request.reply is not None]
            self._dealer.send(Headers.ENGINE_REPLY, replies, bodies=bodies)

    def say_goodbye(self, reason: str, *, failed: bool) -> None:
        """Leave the coordinator's pool; it hands the requests to others."""
        self._dealer.send(Headers.DISCONNECT, reason, failed)

    def _take(self, message: Message) -> None:
        match message.header:
            case Headers.REGISTER_ACK:
                self.registered.set()
            case Headers.REGISTER_REFUSED:
                self.registered.clear()
                self._on_refused(str(message.args[0]) if message.args else "it did not say why")
            case Headers.UNKNOWN_PEER:
                self._register()
            case Headers.BEAT:
                pass
            case _:
                self._on_message(message)

    def _register(self) -> None:
        """Introduce this engine with all it holds; after each (re-)connection, and when the coordinator asks."""
        self.registered.clear()
        registration = Registration(self._replica_group, self._attempt, self._incarnation, *self._describe())
        self._dealer.send(Headers.REGISTER, *registration.wire())

    def _disconnected(self) -> None:
        self.registered.clear()

    async def _send_heartbeats(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            if self.registered.is_set():
                state, _, _, load, _ = self._describe()
                self._dealer.send(Headers.HEARTBEAT, state.value, load)
