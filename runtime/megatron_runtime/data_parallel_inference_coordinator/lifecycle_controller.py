"""The state of the service: moves all engines along the edges of the lifecycle and answers the clients' signals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from megatron_runtime.data_parallel_inference_coordinator.engines import EngineEntry, EngineRegistry
from megatron_runtime.data_parallel_inference_coordinator.outbox import Outbox
from megatron_runtime.headers import EngineState, Headers
from megatron_runtime.lifecycle import (
    ALREADY_DONE,
    EDGES,
    IDLE_STATES,
    SETTLED_STATE,
    STATE_AFTER,
    TRANSITIONAL_STATE,
    CoordinatorState,
    next_signal,
)

SIGNAL_REPEAT_SECONDS = 2.0
"""Time after which a signal is sent again to an engine whose reports show no effect of it. Engines ignore a repeated
signal that they have carried out."""


@dataclass(eq=False)
class _PendingSignal:
    client: bytes
    call_id: int
    deadline: float


class LifecycleController:
    """Holds the target state of the service, sends signals to engines, and answers the clients that wait.

    Args:
        target: The initial state of the service. Engines that register are brought to it before they get requests.
        first_revision: Higher than every revision of an earlier coordinator.
        became_ready: Called when an engine has reached the state of the service.
        before_ready: The message that an engine needs before it can become ready, with its arguments, or None.
    """

    def __init__(
        self,
        *,
        engines: EngineRegistry,
        outbox: Outbox,
        target: CoordinatorState,
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
        """Identities of the engines that have not carried out the signal in progress."""
        self.target = target
        self.in_progress: Headers | None = None
        """The signal that the engines are carrying out."""
        self.revision = first_revision

    @property
    def state(self) -> str:
        """The name of the state, or of the transition in progress."""
        return self.target.name if self.in_progress is None else TRANSITIONAL_STATE[self.in_progress].value

    @property
    def is_idle(self) -> bool:
        """Whether the service is paused or suspended, and no transition is in progress."""
        return self.in_progress is None and SETTLED_STATE[self.target] in IDLE_STATES

    def touch(self) -> None:
        """Count a change that subscribers receive."""
        self.revision += 1

    # Signals of clients

    def signal(self, client: bytes, call_id: int, signal: Headers, deadline: float, now: float) -> None:
        """Start a transition, join the one in progress if it is the same, or refuse the signal."""
        if self.in_progress is None and self.target in ALREADY_DONE.get(signal, ()):
            self._answer(client, call_id)
        elif signal not in (allowed := self._allowed()):
            self._refuse(client, call_id, signal, allowed)
        else:
            if self.in_progress is None:
                self._start(signal, now)
            self._calls.append(_PendingSignal(client, call_id, deadline))
            self._settle()

    def _allowed(self) -> Iterable[Headers]:
        """The signals that a client may send now."""
        return EDGES[self.target].keys() if self.in_progress is None else (self.in_progress,)

    def _start(self, signal: Headers, now: float) -> None:
        self.in_progress, self.target = signal, EDGES[self.target][signal]
        self._missing = {engine.identity for engine in self._engines}
        self.touch()
        if signal is Headers.STOP:
            for engine in self._engines:
                engine.ready = False
        for engine in self._engines:
            self.steer(engine, now)

    def _settle(self) -> None:
        """End the transition and answer the clients once no engine is missing."""
        if self.in_progress is None or self._missing:
            return
        self.target, self.in_progress = STATE_AFTER[self.in_progress], None
        self.touch()
        calls, self._calls = self._calls, []
        for call in calls:
            self._answer(call.client, call.call_id)

    def expire(self, now: float) -> None:
        """Answer the calls that are past their deadline, with the names of the engines that are missing."""
        late = [call for call in self._calls if now >= call.deadline]
        if not late:
            return
        self._calls = [call for call in self._calls if now < call.deadline]
        missing = sorted(engine.name for engine in self._engines if engine.identity in self._missing)
        for call in late:
            self._reply(call.client, call.call_id, {"outcome": "timeout", "state": self.state, "missing": missing})

    # Engines

    def steer(self, engine: EngineEntry, now: float) -> None:
        """Send an engine the signal for its next edge, or make it ready when it has reached the target."""
        if not engine.ready and self.target is not CoordinatorState.STOPPING and (step := self._before_ready(engine)):
            self._send(engine, step[0], now, *step[1])
        elif engine.state is SETTLED_STATE[self.target]:
            self._missing.discard(engine.identity)
            if not engine.ready:
                engine.ready = True
                self.touch()
                self._became_ready()
            self._settle()
        elif (signal := next_signal(engine.state, self.target)) is not None:
            self._send(engine, signal, now)

    def engine_reports(self, engine: EngineEntry, state: EngineState, now: float) -> None:
        """Note the state that an engine reports, and send it the next signal."""
        if state is not engine.state:
            engine.state, engine.signal = state, None
            self.touch()
        self.steer(engine, now)

    def engine_gone(self, engine: EngineEntry) -> None:
        """Stop waiting for an engine that has left."""
        self.touch()
        self._missing.discard(engine.identity)
        self._settle()

    def _send(self, engine: EngineEntry, signal: Headers, now: float, *args: object) -> None:
        if signal is not engine.signal or now - engine.signal_time >= SIGNAL_REPEAT_SECONDS:
            engine.signal, engine.signal_time = signal, now
            self._outbox.put(engine.identity, signal, *args)

    # Answers

    def _answer(self, client: bytes, call_id: int) -> None:
        self._reply(client, call_id, {"outcome": "done", "state": self.state})

    def _refuse(self, client: bytes, call_id: int, signal: Headers, allowed: Iterable[Headers]) -> None:
        names = [header.name.lower() for header in allowed]
        refusal = {"outcome": "refused", "signal": signal.name.lower(), "state": self.state, "allowed": names}
        self._reply(client, call_id, refusal)

    def _reply(self, client: bytes, call_id: int, content: Mapping[str, object]) -> None:
        self._outbox.put(client, Headers.SIGNAL_REPLY, call_id, content)
