"""The data-parallel inference coordinator."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_runtime.data_parallel_inference_coordinator.coordinator import DataParallelInferenceCoordinator
    from megatron_runtime.lifecycle import CoordinatorState

__all__ = ["CoordinatorState", "DataParallelInferenceCoordinator"]

_MODULES = {
    "CoordinatorState": "megatron_runtime.lifecycle",
    "DataParallelInferenceCoordinator": "megatron_runtime.data_parallel_inference_coordinator.coordinator",
}


def __getattr__(name: str) -> Any:
    """Imports on demand: launchers need the states and not the coordinator itself."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
