"""A request of the engine with continuous batching."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megatron_runtime.inference_request.block_hashes import compute_block_hashes_batched
from megatron_runtime.inference_request.event import DynamicInferenceEvent, DynamicInferenceEventType
from megatron_runtime.inference_request.request import InferenceRequest, Status

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_METADATA = (
    ("temperature", "float32", False),
    ("top_k", "int32", False),
    ("top_p", "float32", False),
    ("termination_id", "int64", True),
    ("return_log_probs", "bool", False),
    ("skip_prompt_log_probs", "bool", False),
    ("top_n_logprobs", "int32", False),
)


@dataclass(kw_only=True)
class DynamicInferenceRequest(InferenceRequest):
    """One segment of a request: from its submission or an eviction to the next eviction or its end."""

    prompt_tokens: Tensor | None = None
    """int64 [prompt length], on the host."""
    prompt_length: int | None = None
    """Number of prompt tokens; also in results from a coordinator, which leave out ``prompt_tokens``."""
    remaining_prompt_tokens: Tensor | None = None
    """The rest of the prompt that is not computed yet."""
    policy_staleness: Tensor | None = None
    """int32 [prompt and generated]: weight updates since each token was chosen."""
    kv_cache_staleness: Tensor | None = None
    """int32 [prompt and generated]: weight updates since each token's keys and values were computed."""
    policy_epoch: list[tuple[int, int]] | None = None
    """Generation epochs, each with the index of the token that it begins at; None while no epoch is set."""
    kv_cache_epoch: list[tuple[int, int]] | None = None
    """The same for the keys and values, which begin anew with each segment."""
    latency: float | None = None
    """Seconds from submission to the end."""
    uid: str | None = None
    """The request's UUID in hexadecimal, if it came from a coordinator."""
    routing_indices: Tensor | None = None
    """int32 [total tokens - 1, layers with experts, experts per token], with ``moe_enable_routing_replay``."""
    finished_chunk_token_count: int = 0
    """Number of computed prompt tokens."""
    stop_word_ids: list[list[int]] | None = None
    block_size_tokens: int | None = None
    enable_prefix_caching: bool = False
    precomputed_block_hashes: list[int] = field(default_factory=list)
    """One hash for each complete block of the prompt."""
    adapter_digest: str | None = None
    """SHA-256 of the adapter's files, in hexadecimal; None without an adapter."""
    num_cached_tokens: int = 0
    """Number of prompt tokens whose keys and values were in the prefix cache."""
    ttft: float | None = None
    """Seconds from submission to the first token."""
    events: list[DynamicInferenceEvent] = field(default_factory=list)
    event_add_engine: DynamicInferenceEvent | None = field(default=None, repr=False)
    generated_tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    """"stop", "length", "abort" or "error" once the request has ended."""
    stop_reason: int | str | None = None
    """The stop text, or the token of ``stop_token_ids``, that ended the answer; None for every other end."""
    embedding: list[float] | None = None
    """[hidden size], the pooled hidden states of a request with ``pooling``: after the last norm, not normalized."""
    weight_version: int = 0
    """Version of the engine's weights when the request ended."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sampling_params = copy.deepcopy(self.sampling_params)
        if self.prompt_tokens is None:
            return
        self.prompt_length = int(self.prompt_tokens.numel())
        if self.remaining_prompt_tokens is None:
            self.remaining_prompt_tokens = self.prompt_tokens
        if self.enable_prefix_caching and self.block_size_tokens and not self.precomputed_block_hashes:
            self._compute_block_hashes()

    def _compute_block_hashes(self) -> None:
        assert self.prompt_tokens is not None
        assert self.block_size_tokens is not None
        salt = self.sampling_params.cache_salt if self.sampling_params is not None else None
        self.precomputed_block_hashes = compute_block_hashes_batched(
            self.prompt_tokens, self.block_size_tokens, salt, self.adapter_digest
        )

    @property
    def remaining_prompt_length(self) -> int:
        """Number of prompt tokens that are not computed yet."""
        return 0 if self.remaining_prompt_tokens is None else int(self.remaining_prompt_tokens.numel())

    @property
    def total_tokens(self) -> int:
        """Number of tokens of prompt and answer so far."""
        prompt_length = 0 if self.prompt_tokens is None else int(self.prompt_tokens.numel())
        return prompt_length + len(self.generated_tokens)

    def __str__(self) -> str:
        status = self.status.name if self.status else "[NOT ADDED]"
        prompt_length = self.total_tokens - len(self.generated_tokens)
        return (
            f"id {self.request_id}, {status}, prompt len {prompt_length}, "
            f"gen len {len(self.generated_tokens)}, num events {len(self.events)}"
        )

    def serialize(self) -> dict[str, Any]:
        """All fields except ``event_add_engine``, as plain values for msgpack.

        Raises:
            AssertionError: ``routing_indices`` has another number of rows than the tokens that were computed: all but
                the last one generated.
        """
        if self.routing_indices is not None:
            rows, computed = self.routing_indices.shape[0], self.total_tokens - 1
            assert rows == computed, f"routing_indices has {rows} rows, expected {computed}: all tokens but the last"
        data = super().serialize()
        del data["event_add_engine"]
        data["events"] = [event.serialize() for event in self.events]
        return data

    def _post_deserialize(self, obj: dict[str, Any]) -> None:
        self.events = [DynamicInferenceEvent.deserialize(event) for event in obj.get("events") or []]
        for name in ("policy_epoch", "kv_cache_epoch"):
            stamps = getattr(self, name)
            setattr(self, name, None if stamps is None else [(start, epoch) for start, epoch in stamps])
        added = (event for event in self.events if event.type is DynamicInferenceEventType.ADD_ENGINE)
        self.event_add_engine = next(added, None)

    @property
    def tracked_metadata(self) -> list[Any]:
        """The values that sampling needs per row of a batch, in the order of get_metadata_types."""
        params = self.sampling_params
        assert params is not None, "a request without sampling parameters has no metadata"
        if params.termination_id is None:
            warnings.warn(f"request {self.request_id} has no termination_id; it is set to -1", stacklevel=2)
            params.termination_id = -1
        return [getattr(params, name) for name, _, _ in _METADATA]

    @staticmethod
    def get_metadata_types() -> list[tuple[str, torch.dtype, bool]]:
        """Name, dtype, and whether it is on the device, of each item of tracked_metadata."""
        import torch  # imported here: clients and frontends do not need it

        return [(name, getattr(torch, dtype), on_device) for name, dtype, on_device in _METADATA]

    def add_event(self, type: DynamicInferenceEventType, payload: Any = None) -> DynamicInferenceEvent:
        """Append an event with the current time, and return it."""
        event = DynamicInferenceEvent(type=type, payload=payload)
        self.events.append(event)
        return event

    def add_event_add_engine(self) -> DynamicInferenceEvent:
        """The request enters the engine's queue."""
        self.event_add_engine = self.add_event(DynamicInferenceEventType.ADD_ENGINE)
        return self.event_add_engine

    def add_event_add_context(self) -> DynamicInferenceEvent:
        """The computation of the request's prompt begins."""
        return self.add_event(DynamicInferenceEventType.ADD_CONTEXT)

    def add_event_generated_token(
        self,
        token: int,
        blocks_total: int | None = None,
        blocks_hashed_total: int | None = None,
        blocks_hashed_active: int | None = None,
        blocks_ref_count: int | None = None,
    ) -> DynamicInferenceEvent:
        """A token was generated; the payload has the use of KV blocks at that time, where known."""
        use = {
            "blocks_total": blocks_total,
            "blocks_hashed_total": blocks_hashed_total,
            "blocks_hashed_active": blocks_hashed_active,
            "blocks_ref_count": blocks_ref_count,
        }
        payload = {"token_id": token, **{name: value for name, value in use.items() if value is not None}}
        return self.add_event(DynamicInferenceEventType.GENERATED_TOKEN, payload)

    def add_event_pause(self) -> DynamicInferenceEvent:
        """The request waits for memory, and keeps its cache."""
        return self.add_event(DynamicInferenceEventType.PAUSE)

    def add_event_evict(self) -> DynamicInferenceEvent:
        """The request lost its cache and waits to be recomputed."""
        return self.add_event(DynamicInferenceEventType.EVICT)

    def add_event_finish(self) -> DynamicInferenceEvent:
        """The request is complete."""
        return self.add_event(DynamicInferenceEventType.FINISH)

    def add_event_fail(self) -> DynamicInferenceEvent:
        """The request ended incomplete."""
        return self.add_event(DynamicInferenceEventType.FAIL)

    def add_event_error_transient(self, error: Exception) -> DynamicInferenceEvent:
        """A transient error."""
        return self.add_event(DynamicInferenceEventType.ERROR_TRANSIENT, error)

    def add_event_error_nontransient(self, error: Exception) -> DynamicInferenceEvent:
        """A permanent error."""
        return self.add_event(DynamicInferenceEventType.ERROR_NONTRANSIENT, error)

    def succeeded(self) -> bool:
        """True if the request is complete."""
        return self.status is Status.COMPLETED

    def failed(self) -> bool:
        """True if the request ended incomplete."""
        return self.status is Status.FAILED

    @property
    def error(self) -> Exception | None:
        """The last error of the request, if any."""
        errors = (event.payload for event in reversed(self.events) if event.type.is_error)
        return next(errors, None)
