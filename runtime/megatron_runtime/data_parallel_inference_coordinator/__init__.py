"""The data parallel inference coordinator."""

from __future__ import annotations

from megatron_runtime.data_parallel_inference_coordinator.coordinator import DataParallelInferenceCoordinator
from megatron_runtime.data_parallel_inference_coordinator.states import CoordinatorState

__all__ = ["CoordinatorState", "DataParallelInferenceCoordinator"]
