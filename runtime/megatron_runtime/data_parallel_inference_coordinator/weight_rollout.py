"""Weight updates: sends them to all engines, and to engines that register later."""

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
    previous: ServiceWeights | None
    missing: set[bytes]
    failures: dict[str, str] = field(default_factory=dict)
    succeeded: int = 0


class WeightRollout:
    """Sends updates to the engines, and brings engines that register later up to date before they get requests.

    A coordinator that replaces another one gets the service's weights as an option, and from the engines that have
    them.

    Args:
        latest: The weights of the service so far; None means those that its engines start with.
        is_idle: Whether the service is paused or suspended, and no transition is in progress.
        state: The name of the service's state.
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
        """Called with the service's weights whenever they change."""

    def start(self, client: bytes, call_id: int, path: str, deadline: float) -> None:
        """Send an update to every engine, or refuse it."""
        if not self._is_idle():
            allowed = ["pause"] if self._state() == EngineState.RUNNING else []
            self._reply(client, call_id, {"outcome": "refused", "allowed": allowed})
            return
        versions = [engine.load.weight_version for engine in self._engines]
        latest = 0 if self._latest is None else self._latest.version
        weights = ServiceWeights(1 + max([latest, *versions]), path)
        missing = {engine.identity for engine in self._engines}
        update = _Update(client, call_id, deadline, weights, self._latest, missing)
        self._open[weights.version] = update
        self._change(weights)
        for engine in self._engines:
            self._send(engine, weights)
        self._settle(update)

    def engine_reports(self, engine: EngineEntry, version: int, error: str) -> bool:
        """Note that an engine has this version, or failed; False if it registered later and can't load the weights."""
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
        """Repeat the updates that an engine may have missed while it was disconnected, and adopt newer weights of it.

        Args:
            path: Of the last weights that the engine got from a coordinator; empty if there are none.

        Returns:
            The engines whose weights are older than those that were adopted.
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
        """Stop waiting for a lost engine."""
        for update in list(self._open.values()):
            update.missing.discard(engine.identity)
            self._settle(update)

    def next_step(self, engine: EngineEntry) -> tuple[Headers, tuple[object, ...]] | None:
        """The next message that brings an engine closer to the service's weights; None if it has them."""
        if self._latest is None or engine.load.weight_version >= self._latest.version:
            return None
        if engine.state is EngineState.RUNNING:
            return Headers.PAUSE, ()
        # During a transition there is nothing to send.
        return (Headers.UPDATE_WEIGHTS, self._latest) if engine.state in IDLE_STATES else None

    def expire(self, now: float) -> None:
        """Answer the calls that are past their deadline, with the names of the engines that have not answered."""
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
            self._change(update.previous)
        self._reply(update.client, update.call_id, {"outcome": "failed", "failures": update.failures})

    def _change(self, weights: ServiceWeights | None) -> None:
        self._latest = weights
        self.on_change(weights)

    def _send(self, engine: EngineEntry, weights: ServiceWeights) -> None:
        self._outbox.put(engine.identity, Headers.UPDATE_WEIGHTS, *weights)

    def _reply(self, client: bytes, call_id: int, content: Mapping[str, object]) -> None:
        self._outbox.put(client, Headers.SIGNAL_REPLY, call_id, {"state": self._state(), **content})
