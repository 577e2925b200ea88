"""The options of a rank, in memory and as the JSON that its process is started with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from megatron_runtime.launch.options import EngineOptions


@dataclass(frozen=True)
class RankOptions:
    """The options that are known when the launcher starts the process. Times are seconds."""

    rank: int
    """Counted over all replica groups."""
    replica_group: int
    """The data-parallel rank of the engine."""
    attempt: int
    local_rank: int
    """Counted within the pod."""
    rendezvous_address: tuple[str, int] | None
    """Host and port of the rendezvous of the replica group; None for a replica group of one rank."""
    rendezvous_timeout: float
    drain_timeout: float
    engine: EngineOptions

    def serialize(self) -> dict[str, Any]:
        """All fields as JSON values."""
        return asdict(self)

    @classmethod
    def deserialize(cls, data: Mapping[str, Any]) -> Self:
        """The options that ``serialize`` was called on, also after a round trip through JSON and with others added."""
        address = data["rendezvous_address"]
        return cls(
            **{
                **{field.name: data[field.name] for field in fields(cls)},
                "rendezvous_address": None if address is None else tuple(address),
                "engine": EngineOptions(**data["engine"]),
            }
        )


@dataclass(frozen=True)
class RankPlan:
    """The options that depend on the checkpoint. The launcher sends them after it has inspected the checkpoint."""

    coordinator_address: str
    checkpoint: str
    """A GGUF file or a checkpoint folder."""
    max_sequence_length: int
    kv_cache_bytes: int | None
    """Size of the KV cache; None lets the rank measure the free memory of its device."""

    def serialize(self) -> dict[str, Any]:
        """All fields as JSON values."""
        return asdict(self)

    @classmethod
    def deserialize(cls, data: Mapping[str, Any]) -> Self:
        """The plan that ``serialize`` was called on, also after a round trip through JSON and with others added."""
        return cls(**{field.name: data[field.name] for field in fields(cls)})
