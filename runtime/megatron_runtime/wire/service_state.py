"""The coordinator's report on the service: its state, and one view per engine."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from megatron_runtime.wire.codec import MalformedMessage
from megatron_runtime.wire.items import engine_state

_TYPES = {"int": (int,), "float": (int, float), "str": (str,), "bool": (bool,)}
"""The types that are valid on the wire, by the annotation of a field."""


@dataclass(frozen=True)
class EngineView:
    """One registered engine, as of its last report."""

    replica_group: int
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
    """How long the current step had been running at the time of the report."""
    weight_version: int
    """Number of weight updates."""
    draining: bool
    ready: bool
    """Whether it has reached the state of the service and gets requests."""
    draft_tokens: int = 0
    """Tokens drafted since this engine started."""
    accepted_draft_tokens: int = 0
    """Those that were the sampled tokens."""


@dataclass(frozen=True)
class AdapterView:
    """A LoRA adapter that requests can name."""

    name: str
    path: str


@dataclass(frozen=True)
class ServiceState:
    """A snapshot of the service. Loads are as of the engines' last heartbeats."""

    state: str
    """RUNNING, PAUSING, PAUSED, UNPAUSING, SUSPENDING, SUSPENDED, RESUMING or STOPPING."""
    revision: int
    """Grows with every change of ``state``, of the set of engines or of their states, not of their loads. A restarted
    coordinator continues with higher numbers."""
    epoch: str
    """Random per coordinator process."""
    engines: tuple[EngineView, ...]
    unassigned_requests: int
    """Requests that wait for an engine."""
    outstanding_requests: int
    """Requests without an answer so far."""
    accepted_requests: int
    """Requests since the coordinator started."""
    dropped_messages: int
    """Malformed, stale or unexpected messages since the coordinator started."""
    adapters: tuple[AdapterView, ...] = ()
    """In the order of their names."""

    def serialize(self) -> dict[str, Any]:
        """As plain maps and lists; without adapters and drafts, as earlier versions read it too."""
        content = asdict(self)
        if not self.adapters:
            del content["adapters"]
        for view in content["engines"]:
            if not view["draft_tokens"]:
                del view["draft_tokens"], view["accepted_draft_tokens"]
        return content

    @classmethod
    def deserialize(cls, content: Any) -> ServiceState:
        """The inverse of `serialize`.

        Raises:
            MalformedMessage: A field is missing, unknown or of the wrong type.
        """
        try:
            engines = tuple(EngineView(**view) for view in content["engines"])
            adapters = tuple(AdapterView(**view) for view in content.get("adapters", ()))
            state = cls(**{**content, "engines": engines, "adapters": adapters})
        except (TypeError, KeyError, AttributeError):
            raise MalformedMessage("not a service state") from None
        _check_fields(state)
        for view in engines:
            _check_fields(view)
        for adapter in adapters:
            _check_fields(adapter)
        return state


def _check_fields(part: ServiceState | EngineView | AdapterView) -> None:
    if not isinstance(part, AdapterView):
        engine_state(part.state)
    for field in fields(part):
        allowed = _TYPES.get(str(field.type))
        if allowed is not None and type(getattr(part, field.name)) not in allowed:
            raise MalformedMessage(f"{field.name} of a service state has the wrong type")
