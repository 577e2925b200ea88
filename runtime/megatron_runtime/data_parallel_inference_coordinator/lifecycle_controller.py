"""The state of the service: moves all engines along the edges of the lifecycle and answers the clients' signals."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

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
    steps_to,
)

SIGNAL_REPEAT_SECONDS = 2.0
"""Time after which a signal is sent again to an engine whose reports show no effect of it. Engines ignore a repeated
signal that they have carried out."""

MAX_QUEUED = 16
"""Maximum number of queued transitions; further signals are refused."""


@dataclass(eq=False)
class _PendingSignal:
    client: bytes
    call_id: int
    deadline: float


@dataclass(eq=False)
class _Transition:
    """One edge of the lifecycle, with the calls that are answered at its end."""

    signal: Headers
    calls: list[_PendingSignal] = field(default_factory=list)


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
        self._current: _Transition | None = None
        self._queued: deque[_Transition] = deque()
        """Transitions that follow the current one, in order."""
        self._paused_to_suspend = False
        """Whether the last SUSPEND paused a running service, so that RESUME also sends UNPAUSE."""
        self._missing: set[bytes] = set()
        """Identities of the engines that have not carried out the signal in progress."""
        self.target = target
        self.revision = first_revision

    @property
    def in_progress(self) -> Headers | None:
        """The signal that the engines are carrying out."""
        return None if self._current is None else self._current.signal

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

    def signal(
        self, client: bytes, call_id: int, signal: Headers, deadline: float, now: float, *, strict: bool = True
    ) -> None:
        """Start a transition, queue it behind the one in progress, or refuse the signal.

        A signal is refused when it is not possible in the state that the transitions before it lead to.

        Args:
            client: Gets the answer, with ``call_id``.
            deadline: Time of the answer at the latest; the transition continues.
            strict: False: SUSPEND and STOP pause a running service first, and RESUME ends that pause too.
        """
        last = self._queued[-1] if self._queued else self._current
        state = self.target if last is None else STATE_AFTER[last.signal]
        call = _PendingSignal(client, call_id, deadline)
        if last is not None and last.signal is signal:
            last.calls.append(call)
        elif state in ALREADY_DONE.get(signal, ()):
            if last is None:
                self._answer(call)
            else:
                last.calls.append(call)
        elif (last is not None and last.signal is Headers.STOP) or len(self._queued) >= MAX_QUEUED:
            self._refuse(call, signal, () if last is None else (last.signal,))
        elif steps := self._steps(state, signal, strict):
            self._queued.extend(_Transition(step) for step in steps)
            self._queued[-1].calls.append(call)
            self._advance(now)
        else:
            self._refuse(call, signal, (*(() if last is None else (last.signal,)), *EDGES[state]))

    def _steps(self, state: CoordinatorState, signal: Headers, strict: bool) -> tuple[Headers, ...]:
        if strict:
            return (signal,) if signal in EDGES[state] else ()
        steps = steps_to(state, signal)
        if steps and signal is Headers.SUSPEND:
            self._paused_to_suspend = Headers.PAUSE in steps
        if steps and signal is Headers.RESUME and self._paused_to_suspend:
            self._paused_to_suspend = False
            return (*steps, Headers.UNPAUSE)
        return steps

    def _advance(self, now: float) -> None:
        """Start the next transition, unless one is in progress."""
        while self._current is None and self._queued:
            self._current = self._queued.popleft()
            signal = self._current.signal
            self.target = EDGES[self.target][signal]
            self._missing = {engine.identity for engine in self._engines}
            self.touch()
            if signal is Headers.STOP:
                for engine in self._engines:
                    engine.ready = False
            for engine in self._engines:
                self.steer(engine, now)
            self._settle(now)

    def _settle(self, now: float) -> None:
        """End the transition once no engine is missing, answer its clients, and start the next one."""
        if self._current is None or self._missing:
            return
        done, self._current = self._current, None
        self.target = STATE_AFTER[done.signal]
        self.touch()
        for call in done.calls:
            self._answer(call)
        self._advance(now)

    def expire(self, now: float) -> None:
        """Answer the calls that are past their deadline, with the names of the engines that are missing."""
        missing = sorted(engine.name for engine in self._engines if engine.identity in self._missing)
        for transition in self._transitions():
            late = [call for call in transition.calls if now >= call.deadline]
            transition.calls = [call for call in transition.calls if now < call.deadline]
            for call in late:
                self._reply(call, {"outcome": "timeout", "state": self.state, "missing": missing})

    def _transitions(self) -> Iterator[_Transition]:
        if self._current is not None:
            yield self._current
        yield from self._queued

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
            self._settle(now)
        elif (signal := next_signal(engine.state, self.target)) is not None:
            self._send(engine, signal, now)

    def engine_reports(self, engine: EngineEntry, state: EngineState, now: float) -> None:
        """Note the state that an engine reports, and send it the next signal."""
        if state is not engine.state:
            engine.state, engine.signal = state, None
            self.touch()
        self.steer(engine, now)

    def engine_gone(self, engine: EngineEntry, now: float) -> None:
        """Stop waiting for an engine that has left."""
        self.touch()
        self._missing.discard(engine.identity)
        self._settle(now)

    def _send(self, engine: EngineEntry, signal: Headers, now: float, *args: object) -> None:
        if signal is not engine.signal or now - engine.signal_time >= SIGNAL_REPEAT_SECONDS:
            engine.signal, engine.signal_time = signal, now
            self._outbox.put(engine.identity, signal, *args)

    # Answers

    def _answer(self, call: _PendingSignal) -> None:
        self._reply(call, {"outcome": "done", "state": self.state})

    def _refuse(self, call: _PendingSignal, signal: Headers, allowed: Iterable[Headers]) -> None:
        names = [header.name.lower() for header in allowed]
        self._reply(call, {"outcome": "refused", "signal": signal.name.lower(), "state": self.state, "allowed": names})

    def _reply(self, call: _PendingSignal, content: Mapping[str, object]) -> None:
        self._outbox.put(call.client, Headers.SIGNAL_REPLY, call.call_id, content)
