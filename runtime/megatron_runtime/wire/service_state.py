"""What the coordinator tells about the service: its state, and one view per engine."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from megatron_runtime.wire.codec import MalformedMessage
from megatron_runtime.wire.items import engine_state

_TYPES = {"int": (int,), "float": (int, float), "str": (str,), "bool": (bool,)}
"""The types that a field of such an annotation may have on the wire."""


@dataclass(frozen=True)
class EngineView:
    """One registered engine, as its last report said."""

    group: int
    attempt: int
    state: str
    running: int
    waiting: int
    kv_blocks_total: int
    kv_blocks_used: int
    prompt_tokens: int
    """Prompt tokens computed since this engine started."""
    generated_tokens: int
    """Tokens generated since this engine started."""
    step_seconds: float
    """How long its current step had been running at the report."""
    weight_version: int
    """How often its weights were updated."""
    draining: bool
    ready: bool
    """Whether it was brought to the service's state and gets requests."""


@dataclass(frozen=True)
class ServiceState:
    """The whole service at one moment. Loads are as of the engines' last heartbeats."""

    state: str
    """RUNNING, PAUSING, PAUSED, UNPAUSING, SUSPENDING, SUSPENDED, RESUMING or STOPPING."""
    revision: int
    """Grows with every change of ``state``, of the set of engines or of their states; not with their loads. It goes on
    growing over a restart of the coordinator."""
    epoch: str
    """Random per coordinator process."""
    engines: tuple[EngineView, ...]
    unassigned_requests: int
    """Requests that wait for an engine to register."""
    outstanding_requests: int
    """All requests that are not answered yet."""
    accepted_requests: int
    """All requests since the coordinator started."""
    dropped_messages: int
    """Malformed, stale or unexpected messages since the coordinator started."""

    def serialize(self) -> dict[str, Any]:
        """As plain maps and lists."""
        return asdict(self)

    @classmethod
    def deserialize(cls, content: Any) -> ServiceState:
        """The inverse of `serialize`.

        Raises:
            MalformedMessage: Fields are missing, or there are others, or one is of another type.
        """
        try:
            engines = tuple(EngineView(**view) for view in content["engines"])
            state = cls(**{**content, "engines": engines})
        except (TypeError, KeyError):
            raise MalformedMessage("not a service state") from None
        _check_fields(state)
        for view in engines:
            _check_fields(view)
        return state


def _check_fields(part: ServiceState | EngineView) -> None:
    engine_state(part.state)
    for field in fields(part):
        allowed = _TYPES.get(str(field.type))
        if allowed is not None and type(getattr(part, field.name)) not in allowed:
            raise MalformedMessage(f"{field.name} of a service state is of another type")
