"""Megatron's path of the base class of contexts; there is one context."""

from __future__ import annotations

from megatron_runtime.engine.context import DynamicInferenceContext as BaseInferenceContext

__all__ = ["BaseInferenceContext"]
