"""The registered engines: who serves which group, and who may still come."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from megatron_runtime.headers import EngineState, Headers
from megatron_runtime.wire.items import EngineLoad, Registration
from megatron_runtime.wire.service_state import EngineView

OUTDATED_SECONDS = 60.0
"""How long older attempts of a group are refused after the newest one has gone. No longer, so that one with a number
that is too high, by mistake or by malice, does not shut the others out for good."""


@dataclass(eq=False)
class EngineEntry:
    """One registered engine."""

    identity: bytes
    group: int
    attempt: int
    incarnation: str
    state: EngineState
    draining: bool
    load: EngineLoad
    last_seen: float
    ready: bool = False
    """It was brought to the service's state once, and gets requests since."""
    signal: Headers | None = None
    """Sent, and no new state reported since."""
    signal_time: float = 0.0
    owned: set[bytes] = field(default_factory=set)
    """UUIDs of the requests that were handed to it."""

    @property
    def name(self) -> str:
        """For messages to people."""
        return f"engine group {self.group} (attempt {self.attempt})"

    def view(self) -> EngineView:
        """For reports to clients."""
        return EngineView(
            group=self.group,
            attempt=self.attempt,
            state=self.state.value,
            draining=self.draining,
            ready=self.ready,
            **self.load._asdict(),
        )


class EngineRegistry:
    """At most one engine per group: a newer attempt replaces an older one, which is refused from then on."""

    def __init__(self, *, sort_by_group: bool) -> None:
        self._sort_by_group = sort_by_group
        self._entries: dict[bytes, EngineEntry] = {}
        self._newest: dict[int, tuple[int, float | None]] = {}
        """By group: the newest attempt, and since when it is gone."""

    def __iter__(self) -> Iterator[EngineEntry]:
        return iter(list(self._entries.values()))

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, identity: bytes) -> EngineEntry | None:
        """The engine behind this socket identity."""
        return self._entries.get(identity)

    def refusal(self, registration: Registration, now: float) -> str | None:
        """Why this engine may not register, or None if it may."""
        newest, gone_since = self._newest.get(registration.group, (registration.attempt, None))
        if registration.attempt >= newest or (gone_since is not None and now - gone_since >= OUTDATED_SECONDS):
            return None
        return (
            f"attempt {registration.attempt} of engine group {registration.group} is outdated: attempt {newest} has "
            f"registered. It is taken again once that one has been gone for {OUTDATED_SECONDS:g} s"
        )

    def predecessors(self, identity: bytes, registration: Registration) -> list[EngineEntry]:
        """The engines that this registration replaces: others of its group, and others behind its socket identity."""
        return [
            entry
            for entry in self._entries.values()
            if (entry.group == registration.group or entry.identity == identity)
            and (entry.identity, entry.group, entry.incarnation)
            != (identity, registration.group, registration.incarnation)
        ]

    def register(self, identity: bytes, registration: Registration, now: float) -> EngineEntry:
        """Enter a new engine, or refresh one that registers again; predecessors must be gone."""
        self._newest[registration.group] = registration.attempt, None
        entry = self._entries.get(identity)
        if entry is None:
            entry = EngineEntry(
                identity=identity,
                group=registration.group,
                attempt=registration.attempt,
                incarnation=registration.incarnation,
                state=registration.state,
                draining=registration.draining,
                load=registration.load,
                last_seen=now,
            )
            self._entries[identity] = entry
            if self._sort_by_group:
                self._entries = dict(sorted(self._entries.items(), key=lambda pair: (pair[1].group, pair[0])))
        entry.attempt, entry.state, entry.draining = registration.attempt, registration.state, registration.draining
        entry.load, entry.last_seen, entry.signal = registration.load, now, None
        return entry

    def remove(self, identity: bytes, now: float) -> EngineEntry | None:
        """Take an engine out of the pool."""
        entry = self._entries.pop(identity, None)
        if entry is not None:
            self._newest[entry.group] = entry.attempt, now
        return entry

    def candidates(self) -> list[EngineEntry]:
        """The engines that new requests may go to, in routing order."""
        return [entry for entry in self._entries.values() if entry.ready and not entry.draining]
