"""The library API."""

from __future__ import annotations

from megatron_runtime.apis.async_llm import MegatronAsyncLLM
from megatron_runtime.apis.llm import MegatronLLM
from megatron_runtime.apis.serve_config import ServeConfig
from megatron_runtime.apis.streaming import GenerationUpdate
from megatron_runtime.inference_request import DynamicInferenceRequest, DynamicInferenceRequestRecord
from megatron_runtime.model.megatron import from_megatron
from megatron_runtime.parallel.layout import ParallelSizes
from megatron_runtime.parallel.world import join_world
from megatron_runtime.sampling_params import SamplingParams

__all__ = [
    "DynamicInferenceRequest",
    "DynamicInferenceRequestRecord",
    "GenerationUpdate",
    "MegatronAsyncLLM",
    "MegatronLLM",
    "ParallelSizes",
    "SamplingParams",
    "ServeConfig",
    "from_megatron",
    "join_world",
]
