"""What a step of the engine tells its caller."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from megatron_runtime.inference_request import DynamicInferenceRequestRecord


@dataclass(frozen=True)
class PartialOutput:
    """New tokens of a streaming request, in order and without gaps.

    The token that ended the answer, and tokens of a stop text, are never among them. Where a stop text began in the
    middle of a token, the finished request's ``generated_text`` is longer than these tokens' text by that beginning.
    """

    request_id: int
    new_tokens: list[int]
    new_log_probs: list[float] | None
    """One value per new token, if the request asked for log probabilities."""
    new_top_n_logprobs: list[dict[str, float]] | None
    """One dict per new token, if the request asked for the likeliest tokens."""


@dataclass(frozen=True)
class EngineStats:
    """How busy the engine is, and what it has done since it was made."""

    running: int
    """Requests that own KV blocks."""
    waiting: int
    """Requests in the queue."""
    kv_blocks_total: int
    kv_blocks_used: int
    prompt_tokens_total: int
    """Prompt tokens of all requests that were ever scheduled."""
    generated_tokens_total: int
    """Tokens that were ever sampled and kept."""
    evictions_total: int
    """How often a request had to give its blocks back."""
    kv_blocks_evictable: int = 0
    """Of the blocks that are not used, those that the prefix cache keeps until their room is needed."""
    cached_tokens_total: int = 0
    """Of the prompt tokens, those that the prefix cache had; without what requests found again after an eviction."""
    prefix_hits_total: int = 0
    """Requests that found the beginning of their prompt in the prefix cache."""
    paused: int = 0
    """Of the running requests, those that wait for a further block with what they own."""
    weight_version: int = 0
    """Of the model's weights now."""


class StepResult(TypedDict):
    """The answer of ``DynamicInferenceEngine.step_modern``."""

    active_request_ids: list[int]
    """Requests that own KV blocks after the step, oldest first."""
    finished_request_records: list[DynamicInferenceRequestRecord]
    """Requests that ended since the last step, for whatever reason."""
    step_time: float
    """Seconds that the step took."""
    cuda_graph_request_count: int | None
    """None: there are no CUDA graphs."""
    partial_outputs: dict[int, PartialOutput]
    """News of streaming requests, by request id."""
