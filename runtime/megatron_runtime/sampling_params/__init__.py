"""Sampling parameters of a request, with their ranges."""

from megatron_runtime.sampling_params.params import (
    DEFAULTS,
    LONGEST_NAME,
    LONGEST_SALT,
    MOST_BAD_CHARACTERS,
    POOLINGS,
    RANGES,
    SEEDS,
    SamplingParams,
)
from megatron_runtime.sampling_params.ranges import Range
from megatron_runtime.sampling_params.token_keys import token_key, token_of_key

__all__ = [
    "DEFAULTS",
    "LONGEST_NAME",
    "LONGEST_SALT",
    "MOST_BAD_CHARACTERS",
    "POOLINGS",
    "RANGES",
    "SEEDS",
    "Range",
    "SamplingParams",
    "token_key",
    "token_of_key",
]
