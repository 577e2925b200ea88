"""Megatron's path of engines."""

from __future__ import annotations

from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.engine.running_engine import RunningEngine as AbstractEngine
from megatron_runtime.errors import EngineSuspendedError

__all__ = ["AbstractEngine", "DynamicInferenceEngine", "EngineSuspendedError"]
