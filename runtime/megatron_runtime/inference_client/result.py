"""What a client hands back: finished requests, and updates of those that stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_runtime.inference_request import DynamicInferenceRequestRecord

if TYPE_CHECKING:
    from megatron_runtime.inference_request import DynamicInferenceRequest


class InferenceResult(DynamicInferenceRequestRecord):
    """A finished request as a record of one segment, which also answers for the attributes of that segment."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.requests[0], name)


@dataclass(frozen=True)
class StreamUpdate:
    """What is new in a streaming request since the last update."""

    new_tokens: list[int]
    new_log_probs: list[float]
    """One per new token if the request asked for log probabilities, else empty."""
    new_top_n_logprobs: list[dict[str, float]]
    """One per new token if the request asked for the likeliest tokens, else empty."""
    finished: DynamicInferenceRequest | None
    """The whole request, in the last update only."""
