"""Megatron's path of the wrapper of a model."""

from __future__ import annotations

from megatron_runtime.engine.inference_wrapper import GPTInferenceWrapper

__all__ = ["GPTInferenceWrapper"]
