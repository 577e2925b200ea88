"""The result of an engine's step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypedDict

from megatron_runtime.inference_request import DynamicInferenceRequestRecord


class PartialOutput(NamedTuple):
    """New tokens of a streaming request, in order and without gaps.

    They never include the token that ended the answer and tokens of a stop string. If a stop string begins inside of a
    token, the finished request's ``generated_text`` is longer than the text of these tokens by the first part of it.
    """

    request_id: int
    new_tokens: list[int]
    new_log_probs: list[float] | None
    """One value per new token, if the request has log probabilities."""
    new_top_n_logprobs: list[dict[str, float]] | None
    """One dict per new token, if the request has top-n log probabilities."""


@dataclass(frozen=True)
class EngineStats:
    """The load of the engine, and its counters since it was created."""

    running: int
    """Requests that own KV blocks."""
    waiting: int
    """Requests in the queue."""
    kv_blocks_total: int
    kv_blocks_used: int
    prompt_tokens_total: int
    """Prompt tokens of all requests that were scheduled."""
    generated_tokens_total: int
    """Tokens that were sampled and kept."""
    evictions_total: int
    """Number of evictions of requests."""
    kv_blocks_evictable: int = 0
    """Unused blocks that the prefix cache keeps until they are needed."""
    cached_tokens_total: int = 0
    """Prompt tokens that were in the prefix cache, without those found again after an eviction."""
    prefix_hits_total: int = 0
    """Requests whose prompt had a prefix in the prefix cache."""
    paused: int = 0
    """Running requests that wait for a further block."""
    weight_version: int = 0
    """Current version of the model's weights."""
    draft_tokens_total: int = 0
    """Tokens that were drafted."""
    accepted_draft_tokens_total: int = 0
    """Drafted tokens that were the sampled ones."""


class StepResult(TypedDict):
    """The result of ``DynamicInferenceEngine.step_modern``."""

    active_request_ids: list[int]
    """Requests that own KV blocks after the step, oldest first."""
    finished_request_records: list[DynamicInferenceRequestRecord]
    """Requests that ended since the last step, for any reason."""
    step_time: float
    """Duration of the step in seconds."""
    cuda_graph_request_count: int | None
    """Requests of the CUDA graph of the pass, with padding; None: it ran eagerly."""
    partial_outputs: dict[int, PartialOutput]
    """New tokens of streaming requests, by request id."""
