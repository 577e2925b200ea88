"""Megatron's path of the controller."""

from __future__ import annotations

from megatron_runtime.engine.text_generation_controller import TextGenerationController

__all__ = ["TextGenerationController"]
