"""The record of a finished request for a trainer."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_runtime.inference_request.dynamic_request import DynamicInferenceRequest
from megatron_runtime.inference_request.event import DynamicInferenceEventType


@dataclass
class FinishedRequestRecord:
    """The entry of a finished request in an engine's ledger."""

    policy_epoch: list[tuple[int, int]] | None
    """As in DynamicInferenceRequest."""
    kv_cache_epoch: list[tuple[int, int]] | None
    """As in DynamicInferenceRequest."""
    num_evictions: int
    """Number of times that the request lost its cache."""

    @classmethod
    def from_request(cls, request: DynamicInferenceRequest) -> FinishedRequestRecord:
        """The entry of a merged request."""
        evictions = sum(event.type is DynamicInferenceEventType.EVICT for event in request.events)
        return cls(_copy(request.policy_epoch), _copy(request.kv_cache_epoch), evictions)


def _copy(stamps: list[tuple[int, int]] | None) -> list[tuple[int, int]] | None:
    return None if stamps is None else list(stamps)
