"""New weights for all engines: who has them, who does not, and who waits to hear of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_runtime.data_parallel_inference_coordinator.engines import EngineEntry, EngineRegistry
from megatron_runtime.data_parallel_inference_coordinator.outbox import Outbox
from megatron_runtime.headers import EngineState, Headers

_TAKES_WEIGHTS = (EngineState.PAUSED, EngineState.SUSPENDED)


class _Weights(NamedTuple):
    version: int
    path: str


@dataclass(eq=False)
class _Update:
    client: bytes
    call_id: int
    deadline: float
    weights: _Weights
    before: _Weights | None
    missing: set[bytes]
    failures: dict[str, str] = field(default_factory=dict)
    succeeded: int = 0


class WeightUpdates:
    """Sends updates to the engines, and brings those that come later up to date before they get requests.

    What was updated is forgotten with this process: a coordinator that replaces one that died tells later engines
    nothing. Every engine's version can be seen in the state of the service.

    Args:
        is_idle: Whether the service is paused or suspended, and on its way nowhere else.
        state: Its state's name.
    """

    def __init__(
        self, *, engines: EngineRegistry, outbox: Outbox, is_idle: Callable[[], bool], state: Callable[[], str]
    ) -> None:
        self._engines = engines
        self._outbox = outbox
        self._is_idle = is_idle
        self._state = state
        self._latest: _Weights | None = None
        self._open: dict[int, _Update] = {}

    def start(self, client: bytes, call_id: int, path: str, deadline: float) -> None:
        """Send an update to every engine, or answer why not."""
        if not self._is_idle():
            allowed = ["pause"] if self._state() == EngineState.RUNNING else []
            self._reply(client, call_id, {"outcome": "refused", "allowed": allowed})
            return
        known = [engine.load.weight_version for engine in self._engines]
        weights = _Weights(1 + max(known + ([] if self._latest is None else [self._latest.version]), default=0), path)
        missing = {engine.identity for engine in self._engines}
        update = _Update(client, call_id, deadline, weights, self._latest, missing)
        self._latest, self._open[weights.version] = weights, update
        for engine in self._engines:
            self._send(engine, weights)
        self._settle(update)

    def engine_reports(self, engine: EngineEntry, version: int, error: str) -> bool:
        """An engine has this version, or an error; False if it came later and can't be brought up to date."""
        if not error:
            engine.load = engine.load._replace(weight_version=version)
        update = self._open.get(version)
        if update is None or engine.identity not in update.missing:
            return not error or engine.ready
        update.missing.discard(engine.identity)
        if error:
            update.failures[engine.name] = error
        else:
            update.succeeded += 1
        self._settle(update)
        return True

    def engine_registered(self, engine: EngineEntry) -> None:
        """Repeat what it may have missed while its connection was gone."""
        for update in self._open.values():
            if engine.identity in update.missing:
                self._send(engine, update.weights)

    def engine_gone(self, engine: EngineEntry) -> None:
        """Nobody waits for a vanished engine."""
        for update in list(self._open.values()):
            update.missing.discard(engine.identity)
            self._settle(update)

    def next_step(self, engine: EngineEntry) -> tuple[Headers, tuple[object, ...]] | None:
        """What an engine has to be told to get nearer to the service's weights; None if it has them."""
        if self._latest is None or engine.load.weight_version >= self._latest.version:
            return None
        if engine.state is EngineState.RUNNING:
            return Headers.PAUSE, ()
        # In between two states it has nothing to be told.
        return (Headers.UPDATE_WEIGHTS, self._latest) if engine.state in _TAKES_WEIGHTS else None

    def expire(self, now: float) -> None:
        """Answer the calls whose time is up, naming the engines that have not answered."""
        for update in list(self._open.values()):
            if now >= update.deadline:
                del self._open[update.weights.version]
                names = sorted(engine.name for engine in self._engines if engine.identity in update.missing)
                self._reply(update.client, update.call_id, {"outcome": "timeout", "missing": names})

    def _settle(self, update: _Update) -> None:
        if update.missing or update.weights.version not in self._open:
            return
        del self._open[update.weights.version]
        if not update.failures:
            self._reply(update.client, update.call_id, {"outcome": "done", "version": update.weights.version})
            return
        if not update.succeeded and self._latest is update.weights:
            self._latest = update.before
        self._reply(update.client, update.call_id, {"outcome": "failed", "failures": update.failures})

    def _send(self, engine: EngineEntry, weights: _Weights) -> None:
        self._outbox.put(engine.identity, Headers.UPDATE_WEIGHTS, *weights)

    def _reply(self, client: bytes, call_id: int, content: Mapping[str, object]) -> None:
        self._outbox.put(client, Headers.SIGNAL_REPLY, call_id, {"state": self._state(), **content})
