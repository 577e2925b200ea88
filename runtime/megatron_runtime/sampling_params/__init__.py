"""Sampling parameters of a request, with their ranges."""

from megatron_runtime.sampling_params.params import DEFAULTS, RANGES, SEEDS, SamplingParams
from megatron_runtime.sampling_params.ranges import Range

__all__ = ["DEFAULTS", "RANGES", "SEEDS", "Range", "SamplingParams"]
