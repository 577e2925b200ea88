"""Megatron's path of the engine, its states and the entries of its requests."""

from __future__ import annotations

from megatron_runtime.compat._sizes import size_text as format_mem_bytes
from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.engine.tracked_request import TrackedRequest as RequestEntry
from megatron_runtime.errors import EngineSuspendedError
from megatron_runtime.headers import EngineState

__all__ = ["DynamicInferenceEngine", "EngineState", "EngineSuspendedError", "RequestEntry", "format_mem_bytes"]
