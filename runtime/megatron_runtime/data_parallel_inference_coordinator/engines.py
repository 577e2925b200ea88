"""The registered engines: at most one per replica group."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from megatron_runtime.headers import EngineState, Headers
from megatron_runtime.wire.items import EngineLoad, Registration
from megatron_runtime.wire.service_state import EngineView

OUTDATED_SECONDS = 60.0
"""Time after the loss of a replica group's newest attempt during which older attempts are still refused. It is limited
so that an attempt number that is too high, by mistake or by an attack, does not lock the replica group out."""


@dataclass(eq=False)
class EngineEntry:
    """One registered engine."""

    identity: bytes
    replica_group: int
    attempt: int
    incarnation: str
    state: EngineState
    draining: bool
    load: EngineLoad
    last_seen: float
    adapters_version: int = 0
    """Of the adapters that the coordinator has assigned to it."""
    own_adapters: dict[str, str] = field(default_factory=dict)
    """Names and paths of the adapters that it was started with."""
    ready: bool = False
    """The engine has reached the state of the service once, and gets requests since."""
    signal: Headers | None = None
    """The last signal sent, until the engine reports a new state."""
    signal_time: float = 0.0
    owned: set[bytes] = field(default_factory=set)
    """UUIDs of the requests that are assigned to it."""
    pushed: int = 0
    """Bytes of bodies that were sent since the last tick without being asked for."""

    @property
    def name(self) -> str:
        """For messages."""
        return f"replica group {self.replica_group} (attempt {self.attempt})"

    def view(self) -> EngineView:
        """For reports to clients."""
        return EngineView(
            replica_group=self.replica_group,
            attempt=self.attempt,
            state=self.state.value,
            draining=self.draining,
            ready=self.ready,
            **self.load._asdict(),
        )


class EngineRegistry:
    """Holds one engine per replica group: a newer attempt replaces an older one, which is refused from then on."""

    def __init__(self, *, sort_by_group: bool) -> None:
        self._sort_by_group = sort_by_group
        self._entries: dict[bytes, EngineEntry] = {}
        self._newest: dict[int, tuple[int, float | None]] = {}
        """By replica group: the newest attempt, and the time of its loss."""

    def __iter__(self) -> Iterator[EngineEntry]:
        return iter(list(self._entries.values()))

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, identity: bytes) -> EngineEntry | None:
        """The engine with this socket identity."""
        return self._entries.get(identity)

    def refusal(self, registration: Registration, now: float) -> str | None:
        """Why this engine may not register, or None if it may."""
        newest, lost_at = self._newest.get(registration.replica_group, (registration.attempt, None))
        if registration.attempt >= newest or (lost_at is not None and now - lost_at >= OUTDATED_SECONDS):
            return None
        return (
            f"attempt {registration.attempt} of replica group {registration.replica_group} is outdated: attempt "
            f"{newest} has registered. An older attempt may register {OUTDATED_SECONDS:g} s after the newer one is lost"
        )

    def predecessors(self, identity: bytes, registration: Registration) -> list[EngineEntry]:
        """The engines that this registration replaces: those of its replica group or with its socket identity."""
        return [
            entry
            for entry in self._entries.values()
            if (entry.replica_group == registration.replica_group or entry.identity == identity)
            and (entry.identity, entry.replica_group, entry.incarnation)
            != (identity, registration.replica_group, registration.incarnation)
        ]

    def register(self, identity: bytes, registration: Registration, now: float) -> EngineEntry:
        """Add an engine, or update one that registers again. Its predecessors must have been removed."""
        self._newest[registration.replica_group] = registration.attempt, None
        entry = self._entries.get(identity)
        if entry is None:
            entry = EngineEntry(
                identity=identity,
                replica_group=registration.replica_group,
                attempt=registration.attempt,
                incarnation=registration.incarnation,
                state=registration.state,
                draining=registration.draining,
                load=registration.load,
                last_seen=now,
            )
            self._entries[identity] = entry
            if self._sort_by_group:
                by_group = sorted(self._entries.items(), key=lambda pair: (pair[1].replica_group, pair[0]))
                self._entries = dict(by_group)
        entry.attempt, entry.state, entry.draining = registration.attempt, registration.state, registration.draining
        entry.load, entry.last_seen, entry.signal = registration.load, now, None
        return entry

    def remove(self, identity: bytes, now: float) -> EngineEntry | None:
        """Remove an engine."""
        entry = self._entries.pop(identity, None)
        if entry is not None:
            self._newest[entry.replica_group] = entry.attempt, now
        return entry

    def candidates(self) -> list[EngineEntry]:
        """The engines that new requests may be routed to, in routing order."""
        return [entry for entry in self._entries.values() if entry.ready and not entry.draining]
