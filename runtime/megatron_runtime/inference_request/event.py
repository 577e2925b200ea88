"""Events of a request."""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from megatron_runtime.errors import deserialize_error, serialize_error


class DynamicInferenceEventType(Enum):
    """The types of events."""

    ADD_ENGINE = auto()
    ADD_CONTEXT = auto()
    GENERATED_TOKEN = auto()
    PAUSE = auto()
    EVICT = auto()
    FINISH = auto()
    FAIL = auto()
    ERROR_TRANSIENT = auto()
    ERROR_NONTRANSIENT = auto()

    @property
    def is_error(self) -> bool:
        """True if the event carries an exception."""
        return self in (DynamicInferenceEventType.ERROR_TRANSIENT, DynamicInferenceEventType.ERROR_NONTRANSIENT)


@dataclass
class DynamicInferenceEvent:
    """One event of a request.

    The payload is the exception for the two error events, a dict with ``token_id`` for GENERATED_TOKEN, and None for
    all others.
    """

    type: DynamicInferenceEventType
    timestamp: float | None = None
    """Seconds since the epoch; default: now."""
    payload: Any = None

    def __post_init__(self) -> None:
        if self.timestamp is None:
            self.timestamp = time.time()
        if self.type.is_error:
            assert self.payload is not None, f"{self.type.name} needs the error as its payload"
        elif self.type is DynamicInferenceEventType.GENERATED_TOKEN:
            assert isinstance(self.payload, dict), "GENERATED_TOKEN needs a dict as its payload"
            assert "token_id" in self.payload, "GENERATED_TOKEN needs token_id in its payload"
        else:
            assert self.payload is None, f"{self.type.name} takes no payload"

    def __str__(self) -> str:
        text = f"[{self.timestamp:.3f}] {self.type.name}"
        if self.payload is None:
            return text
        if self.type is DynamicInferenceEventType.GENERATED_TOKEN:
            return f"{text}, token={self.payload['token_id']}"
        return f"{text}, {type(self.payload).__name__}"

    def serialize(self) -> dict[str, Any]:
        """The event as plain values."""
        payload = serialize_error(self.payload) if self.type.is_error else self.payload
        return {"timestamp": self.timestamp, "type": self.type.name, "payload": payload}

    @classmethod
    def deserialize(cls, obj: dict[str, Any]) -> DynamicInferenceEvent:
        """The inverse of serialize."""
        kind = DynamicInferenceEventType[obj["type"]]
        payload = deserialize_error(obj["payload"]) if kind.is_error else obj["payload"]
        return cls(type=kind, timestamp=obj["timestamp"], payload=payload)
