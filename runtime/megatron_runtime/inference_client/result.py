"""The results of a client: finished requests, and updates of streaming requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_runtime.inference_request import DynamicInferenceRequestRecord

if TYPE_CHECKING:
    from megatron_runtime.inference_request import DynamicInferenceRequest


class InferenceResult(DynamicInferenceRequestRecord):
    """A finished request as a record of one segment; it also has the attributes of that segment."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.requests[0], name)


@dataclass(frozen=True)
class StreamUpdate:
    """New tokens of a streaming request since the last update."""

    new_tokens: list[int]
    new_log_probs: list[float]
    """One per new token if the request has log probabilities, else empty."""
    new_top_n_logprobs: list[dict[str, float]]
    """One per new token if the request has top-n log probabilities, else empty."""
    finished: DynamicInferenceRequest | None
    """The finished request, in the last update only."""
