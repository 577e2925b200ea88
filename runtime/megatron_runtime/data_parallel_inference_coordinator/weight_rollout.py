"""New weights for all engines: who has them, who does not, and who waits to hear of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from megatron_runtime.data_parallel_inference_coordinator.engines import EngineEntry, EngineRegistry
from megatron_runtime.data_parallel_inference_coordinator.options import ServiceWeights
from megatron_runtime.data_parallel_inference_coordinator.outbox import Outbox
from megatron_runtime.headers import EngineState, Headers
from megatron_runtime.lifecycle import IDLE_STATES


@dataclass(eq=False)
class _Update:
    client: bytes
    call_id: int
    deadline: float
    weights: ServiceWeights
    before: ServiceWeights | None
    missing: set[bytes]
    failures: dict[str, str] = field(default_factory=dict)
    succeeded: int = 0


class WeightRollout:
    """Sends updates to the engines, and brings those that come later up to date before they get requests.

    A coordinator that replaces one that died is told the service's weights by whoever starts it, and hears of them from
    the engines that have them.

    Args:
        latest: The weights that the service had already; None means those that its engines start with.
        is_idle: Whether the service is paused or suspended, and on its way nowhere else.
        state: Its state's name.
    """

    def __init__(
        self,
        *,
        engines: EngineRegistry,
        outbox: Outbox,
        latest: ServiceWeights | None,
        is_idle: Callable[[], bool],
        state: Callable[[], str],
    ) -> None:
        self._engines = engines
        self._outbox = outbox
        self._is_idle = is_idle
        self._state = state
        self._latest = latest
        self._open: dict[int, _Update] = {}
        self.on_change: Callable[[ServiceWeights | None], None] = lambda _: None
        """Called with the service's weights whenever they are others."""

    def start(self, client: bytes, call_id: int, path: str, deadline: float) -> None:
        """Send an update to every engine, or answer why not."""
        if not self._is_idle():
            allowed = ["pause"] if self._state() == EngineState.RUNNING else []
            self._reply(client, call_id, {"outcome": "refused", "allowed": allowed})
            return
        known = [engine.load.weight_version for engine in self._engines]
        before = 0 if self._latest is None else self._latest.version
        weights = ServiceWeights(1 + max([before, *known]), path)
        missing = {engine.identity for engine in self._engines}
        update = _Update(client, call_id, deadline, weights, self._latest, missing)
        self._open[weights.version] = update
        self._change(weights)
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

    def engine_registered(self, engine: EngineEntry, path: str) -> list[EngineEntry]:
        """Repeat what it may have missed while its connection was gone, and learn from it.

        Args:
            path: Of the weights that a coordinator gave it last; empty if none did.

        Returns:
            The engines that have turned out to have older weights than the service.
        """
        for update in self._open.values():
            if engine.identity in update.missing:
                self._send(engine, update.weights)
        weights = ServiceWeights(engine.load.weight_version, path)
        if not path or (self._latest is not None and weights.version <= self._latest.version):
            return []
        self._change(weights)
        return [other for other in self._engines if other.load.weight_version < weights.version]

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
        return (Headers.UPDATE_WEIGHTS, self._latest) if engine.state in IDLE_STATES else None

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
            self._change(update.before)
        self._reply(update.client, update.call_id, {"outcome": "failed", "failures": update.failures})

    def _change(self, weights: ServiceWeights | None) -> None:
        self._latest = weights
        self.on_change(weights)

    def _send(self, engine: EngineEntry, weights: ServiceWeights) -> None:
        self._outbox.put(engine.identity, Headers.UPDATE_WEIGHTS, *weights)

    def _reply(self, client: bytes, call_id: int, content: Mapping[str, object]) -> None:
        self._outbox.put(client, Headers.SIGNAL_REPLY, call_id, {"state": self._state(), **content})
