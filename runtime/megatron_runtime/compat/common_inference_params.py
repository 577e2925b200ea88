"""Megatron's older path and name of the sampling parameters."""

from __future__ import annotations

from megatron_runtime.sampling_params import SamplingParams as CommonInferenceParams

__all__ = ["CommonInferenceParams"]
