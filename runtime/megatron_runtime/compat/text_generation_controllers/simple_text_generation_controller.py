"""Megatron's older path and name of the controller."""

from __future__ import annotations

from megatron_runtime.engine.text_generation_controller import (
    TextGenerationController as SimpleTextGenerationController,
)

__all__ = ["SimpleTextGenerationController"]
