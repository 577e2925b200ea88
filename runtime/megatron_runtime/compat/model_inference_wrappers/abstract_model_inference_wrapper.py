"""Megatron's path of the base class of wrappers; there is one wrapper."""

from __future__ import annotations

from megatron_runtime.engine.inference_wrapper import GPTInferenceWrapper as AbstractModelInferenceWrapper

__all__ = ["AbstractModelInferenceWrapper"]
