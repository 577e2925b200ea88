"""LoRA adapters: changes them on all engines or on none, and on engines that register later."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from megatron_runtime.data_parallel_inference_coordinator.engines import EngineEntry, EngineRegistry
from megatron_runtime.data_parallel_inference_coordinator.outbox import Outbox
from megatron_runtime.headers import Headers
from megatron_runtime.wire.items import AdapterEntry, AdapterReport

MAX_QUEUED = 64
"""Maximum number of queued changes; further ones are refused."""


@dataclass(frozen=True)
class AdapterCall:
    """The call of a client that changes one adapter."""

    client: bytes
    call_id: int
    deadline: float
    name: str
    path: str
    """Of the adapter to load; empty: the adapter is unloaded."""
    replaces: bool
    """Whether an adapter of this name is replaced."""


@dataclass(eq=False)
class _Change:
    call: AdapterCall
    version: int
    entries: dict[str, AdapterEntry]
    missing: set[bytes]
    failures: dict[str, str] = field(default_factory=dict)
    succeeded: int = 0


class AdapterRollout:
    """Assigns the whole set of the service's adapters to each engine, with a version.

    An engine that has failed to load a set keeps the last one; then all engines get the last set again, as another
    version. A coordinator that replaces another one adopts the newest set of the engines.

    Args:
        state: The name of the service's state.
        on_change: Called when the adapters that clients may name have changed.
    """

    def __init__(
        self, engines: EngineRegistry, outbox: Outbox, *, state: Callable[[], str], on_change: Callable[[], None]
    ) -> None:
        self._engines = engines
        self._outbox = outbox
        self._state = state
        self._on_change = on_change
        self._version = 0
        self._entries: dict[str, AdapterEntry] = {}
        self._change: _Change | None = None
        self._queued: deque[AdapterCall] = deque()

    @property
    def served(self) -> list[tuple[str, str]]:
        """Names and paths of the adapters that requests can name: those of the service, and those that all engines were
        started with. An adapter that is being unloaded is not among them.
        """
        own = [engine.own_adapters for engine in self._engines.candidates() or self._engines]
        common = {name: path for name, path in own[0].items() if all(name in each for each in own)} if own else {}
        leaving = self._change.call.name if self._change is not None and not self._change.call.path else None
        assigned = {entry.name: entry.path for entry in self._entries.values() if entry.name != leaving}
        return sorted((common | assigned).items())

    def start(self, call: AdapterCall) -> None:
        """Begin a change, or queue it behind the others, or refuse it."""
        if len(self._queued) >= MAX_QUEUED:
            self._refuse(call, f"{MAX_QUEUED} changes of adapters wait already; try again later")
            return
        self._queued.append(call)
        self._begin_next()

    def engine_reports(self, engine: EngineEntry, version: int, error: str) -> bool:
        """Note that an engine has this version, or failed; False if it can't load the adapters of the others."""
        if not error:
            engine.adapters_version = version
        change = self._change
        if change is None or version != change.version or engine.identity not in change.missing:
            return not error or version != self._version
        change.missing.discard(engine.identity)
        if error:
            change.failures[engine.name] = error
        else:
            change.succeeded += 1
        self._settle()
        return True

    def engine_registered(self, engine: EngineEntry, report: AdapterReport) -> list[EngineEntry]:
        """Note the adapters of an engine, and adopt a newer set of it.

        Returns:
            The engines whose set is not the one that was adopted.
        """
        engine.adapters_version = report.version
        engine.own_adapters = {entry.name: entry.path for entry in report.own}
        if self._change is not None:
            self._change.missing.add(engine.identity)
            self._send(engine)
            return []
        if report.version <= self._version:
            return []
        self._version, self._entries = report.version, {entry.name: entry for entry in report.assigned}
        self._on_change()
        return [other for other in self._engines if other.adapters_version != self._version]

    def engine_gone(self, engine: EngineEntry) -> None:
        """Stop waiting for a lost engine."""
        if self._change is not None:
            self._change.missing.discard(engine.identity)
            self._settle()

    def next_step(self, engine: EngineEntry) -> tuple[Headers, tuple[object, ...]] | None:
        """The message that brings an engine up to date; None if it is."""
        version, entries = self._latest()
        return None if engine.adapters_version == version else (Headers.ASSIGN_ADAPTERS, (version, entries))

    def expire(self, now: float) -> None:
        """Undo a change that is past its deadline, and answer its call with the names of the missing engines."""
        change = self._change
        if change is not None and now >= change.call.deadline:
            names = sorted(engine.name for engine in self._engines if engine.identity in change.missing)
            self._undo(change)
            self._reply(change.call, {"outcome": "timeout", "missing": names})
            self._begin_next()

    def _begin_next(self) -> None:
        while self._change is None and self._queued:
            call = self._queued.popleft()
            if not call.path and call.name not in self._known:
                loaded = ", ".join(sorted(self._entries)) or "none"
                message = f"adapter {call.name!r} is not loaded; loaded adapters: {loaded}"
                self._reply(call, {"outcome": "unknown", "message": message})
                continue
            if (obstacle := self._obstacle(call)) is not None:
                self._refuse(call, obstacle)
                continue
            version = self._version + 1
            entries = {name: entry for name, entry in self._entries.items() if name != call.name}
            if call.path:
                entries[call.name] = AdapterEntry(call.name, call.path, version)
            self._change = _Change(call, version, entries, {engine.identity for engine in self._engines})
            if not call.path:
                self._on_change()
            for engine in self._engines:
                self._send(engine)
            self._settle()

    @property
    def _known(self) -> set[str]:
        """The names of all adapters."""
        return self._entries.keys() | {name for engine in self._engines for name in engine.own_adapters}

    def _obstacle(self, call: AdapterCall) -> str | None:
        if call.name in self._known - self._entries.keys():
            return (
                f"adapter {call.name!r} is one of --lora-modules, with which the server was started; change them there"
            )
        known = self._entries.get(call.name)
        if call.path and known is not None and not call.replaces:
            return f"adapter {call.name!r} is loaded from {known.path}; set load_inplace to replace it"
        return None

    def _settle(self) -> None:
        change = self._change
        if change is None or change.missing:
            return
        if change.failures or (change.call.path and not change.succeeded):
            self._undo(change)
            failed = {"outcome": "failed", "failures": change.failures}
            # Without engines, a file could not be checked.
            self._reply(change.call, failed if change.failures else {"outcome": "timeout", "missing": []})
        else:
            self._change, self._version, self._entries = None, change.version, change.entries
            self._on_change()
            self._reply(change.call, {"outcome": "done"})
        self._begin_next()

    def _undo(self, change: _Change) -> None:
        self._change, self._version = None, change.version + 1
        self._on_change()
        for engine in self._engines:
            self._send(engine)

    def _latest(self) -> tuple[int, list[AdapterEntry]]:
        if self._change is not None:
            return self._change.version, list(self._change.entries.values())
        return self._version, list(self._entries.values())

    def _send(self, engine: EngineEntry) -> None:
        self._outbox.put(engine.identity, Headers.ASSIGN_ADAPTERS, *self._latest())

    def _refuse(self, call: AdapterCall, message: str) -> None:
        self._reply(call, {"outcome": "invalid", "message": message})

    def _reply(self, call: AdapterCall, content: Mapping[str, object]) -> None:
        self._outbox.put(call.client, Headers.SIGNAL_REPLY, call.call_id, {"state": self._state(), **content})
