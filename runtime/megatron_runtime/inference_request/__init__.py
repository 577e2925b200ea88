"""Requests, their events, and the records that survive a request's eviction."""

from __future__ import annotations

from megatron_runtime.inference_request.block_hashes import (
    HASH_BASE,
    HASH_PRIME,
    compute_block_hashes,
    compute_block_hashes_batched,
)
from megatron_runtime.inference_request.dynamic_request import DynamicInferenceRequest
from megatron_runtime.inference_request.event import DynamicInferenceEvent, DynamicInferenceEventType
from megatron_runtime.inference_request.finished_record import FinishedRequestRecord
from megatron_runtime.inference_request.record import DynamicInferenceRequestRecord
from megatron_runtime.inference_request.request import InferenceRequest, Status
from megatron_runtime.inference_request.tensor_codec import (
    deserialize_ndarray,
    deserialize_tensor,
    serialize_ndarray,
    serialize_tensor,
    unwrap_serialized_tensors,
)
from megatron_runtime.inference_request.vlm_request import VLMInferenceRequest

__all__ = [
    "HASH_BASE",
    "HASH_PRIME",
    "DynamicInferenceEvent",
    "DynamicInferenceEventType",
    "DynamicInferenceRequest",
    "DynamicInferenceRequestRecord",
    "FinishedRequestRecord",
    "InferenceRequest",
    "Status",
    "VLMInferenceRequest",
    "compute_block_hashes",
    "compute_block_hashes_batched",
    "deserialize_ndarray",
    "deserialize_tensor",
    "serialize_ndarray",
    "serialize_tensor",
    "unwrap_serialized_tensors",
]
