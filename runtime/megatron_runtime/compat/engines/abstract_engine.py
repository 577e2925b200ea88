"""Megatron's path of the base class of engines."""

from __future__ import annotations

from megatron_runtime.engine.running_engine import RunningEngine as AbstractEngine

__all__ = ["AbstractEngine"]
