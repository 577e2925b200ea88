"""The state of the service: control signals, walked engine by engine along legal edges, each with an answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megatron_runtime.data_parallel_inference_coordinator.engines import EngineEntry, EngineRegistry
from megatron_runtime.data_parallel_inference_coordinator.outbox import Outbox
from megatron_runtime.data_parallel_inference_coordinator.states import (
    ALREADY_THERE,
    EDGES,
    ENGINE_STATE,
    IN_BETWEEN,
    CoordinatorState,
    next_signal,
)
from megatron_runtime.headers import EngineState, Headers

SIGNAL_REPEAT_SECONDS = 2.0
"""An engine whose reports show no effect of a signal for so long is sent it again; it ignores what it did already."""


@dataclass(eq=False)
class _PendingSignal:
    client: bytes
    call_id: int
    deadline: float


class LifecycleController:
    """Where the engines are wished to be, and who waits to hear that they are there.

    Args:
        wish: Where the service starts; engines that register are brought there before they get requests.
        first_revision: Higher than any that a coordinator before this one has reached.
        became_ready: Called when an engine has been brought to the service's state.
        before_ready: What an engine has to be told before it is, if anything, with arguments.
    """

    def __init__(
        self,
        *,
        engines: EngineRegistry,
        outbox: Outbox,
        wish: CoordinatorState,
        first_revision: int,
        became_ready: Callable[[], None],
        before_ready: Callable[[EngineEntry], tuple[Headers, tuple[object, ...]] | None] = lambda _: None,
    ) -> None:
        self._engines = engines
        self._outbox = outbox
        self._became_ready = became_ready
        self._before_ready = before_ready
        self._calls: list[_PendingSignal] = []
        self._missing: set[bytes] = set()
        self.wish = wish
        self.moving: Headers | None = None
        """The signal that is on its way through the engines."""
        self.revision = first_revision

    @property
    def state(self) -> str:
        """The name of the state, or of the way to it."""
        return self.wish.name if self.moving is None else IN_BETWEEN[self.moving].value

    def touch(self) -> None:
        """Something changed that subscribers want to know."""
        self.revision += 1

    def signal(self, client: bytes, call_id: int, signal: Headers, deadline: float, now: float) -> None:
        """Start moving the engines, or join a move that is in flight, or answer why not."""
        if self.moving is not None and signal != self.moving:
            self._refuse(client, call_id, signal, allowed=[self.moving])
            return
        if self.moving is None and self.wish in ALREADY_THERE.get(signal, ()):
            self._answer(client, call_id)
            return
        if self.moving is None:
            edges = EDGES[self.wish]
            if signal not in edges:
                self._refuse(client, call_id, signal, allowed=edges)
                return
            self._start(signal, edges[signal], now)
        self._calls.append(_PendingSignal(client, call_id, deadline))
        self._settle()

    def _start(self, signal: Headers, wish: CoordinatorState, now: float) -> None:
        self.moving, self.wish = signal, wish
        self._missing = {engine.identity for engine in self._engines}
        self.touch()
        if signal is Headers.STOP:
            for engine in self._engines:
                engine.ready = False
        for engine in self._engines:
            self.steer(engine, now)

    @property
    def is_idle(self) -> bool:
        """Whether all engines are paused, or all suspended."""
        return self.moving is None and self.wish in (CoordinatorState.PAUSED, CoordinatorState.SUSPENDED)

    def steer(self, engine: EngineEntry, now: float) -> None:
        """Send an engine the signal for its next edge towards the wish, or let it have traffic if it is there."""
        if not engine.ready and self.wish is not CoordinatorState.STOPPING and (step := self._before_ready(engine)):
            self._send(engine, step[0], now, *step[1])
            return
        if engine.state is ENGINE_STATE[self.wish]:
            self._missing.discard(engine.identity)
            if not engine.ready:
                engine.ready = True
                self.touch()
                self._became_ready()
            self._settle()
            return
        signal = next_signal(engine.state, self.wish)
        if signal is not None:
            self._send(engine, signal, now)

    def _send(self, engine: EngineEntry, signal: Headers, now: float, *args: object) -> None:
        if signal is not engine.signal or now - engine.signal_time >= SIGNAL_REPEAT_SECONDS:
            engine.signal, engine.signal_time = signal, now
            self._outbox.put(engine.identity, signal, *args)

    def engine_reports(self, engine: EngineEntry, state: EngineState, now: float) -> None:
        """An engine says where it stands; lead it on from there."""
        if state is not engine.state:
            engine.state, engine.signal = state, None
            self.touch()
        self.steer(engine, now)

    def engine_gone(self, engine: EngineEntry) -> None:
        """Nobody waits for a vanished engine to arrive anywhere."""
        self.touch()
        self._missing.discard(engine.identity)
        self._settle()

    def expire(self, now: float) -> None:
        """Answer the calls whose time is up, naming the engines that have not arrived."""
        late = [call for call in self._calls if now >= call.deadline]
        if not late:
            return
        self._calls = [call for call in self._calls if now < call.deadline]
        missing = sorted(engine.name for engine in self._engines if engine.identity in self._missing)
        for call in late:
            self._reply(call.client, call.call_id, {"outcome": "timeout", "state": self.state, "missing": missing})

    def _settle(self) -> None:
        if self.moving is None or self._missing:
            return
        self.moving = None
        if self.wish is CoordinatorState.STOPPING:
            # All engines have left; those that register from now on are wanted.
            self.wish = CoordinatorState.RUNNING
        self.touch()
        calls, self._calls = self._calls, []
        for call in calls:
            self._answer(call.client, call.call_id)

    def _answer(self, client: bytes, call_id: int) -> None:
        self._reply(client, call_id, {"outcome": "done", "state": self.state})

    def _refuse(
        self, client: bytes, call_id: int, signal: Headers, allowed: Mapping[Headers, object] | list[Headers]
    ) -> None:
        names = [header.name.lower() for header in allowed]
        refusal = {"outcome": "refused", "signal": signal.name.lower(), "state": self.state, "allowed": names}
        self._reply(client, call_id, refusal)

    def _reply(self, client: bytes, call_id: int, content: Mapping[str, object]) -> None:
        self._outbox.put(client, Headers.SIGNAL_REPLY, call_id, content)
