"""The engine's settings: defaults that work, and refusals that name the field."""

from __future__ import annotations

import pytest

from megatron_runtime.config import InferenceConfig, KVCacheManagementMode
from megatron_runtime.errors import ConfigurationError


def test_the_defaults_are_valid() -> None:
    config = InferenceConfig()
    assert config.block_size_tokens == 16
    assert config.pool_bytes("cuda") == 20 * 2**30
    assert config.pool_bytes("cpu") == 2 * 2**30


def test_bytes_win_over_gigabytes() -> None:
    assert InferenceConfig(buffer_size_gb=0.5).pool_bytes("cpu") == 2**29
    assert InferenceConfig(buffer_size_gb=0.5, kv_cache_memory_bytes=77).pool_bytes("cuda") == 77


def test_a_mode_can_be_given_by_its_name() -> None:
    config = InferenceConfig(kv_cache_management_mode="offload")  # type: ignore[arg-type]
    assert config.kv_cache_management_mode is KVCacheManagementMode.OFFLOAD


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_size_tokens", 0),
        ("block_size_tokens", 1.5),
        ("block_size_tokens", True),
        ("buffer_size_gb", -1),
        ("kv_cache_memory_bytes", 0),
        ("max_requests", "many"),
        ("max_tokens", -5),
        ("max_sequence_length", 0),
        ("request_timeout", 0.0),
        ("kv_cache_management_mode", "burn"),
        ("prefix_caching_eviction_policy", "fifo"),
        ("prefix_caching_coordinator_policy", "random"),
        ("prefix_caching_routing_alpha", 1.5),
    ],
)
def test_a_value_that_can_not_work_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ConfigurationError, match=f"{field}={value!r}") as refusal:
        InferenceConfig(**{field: value})
    assert refusal.value.field == field


def test_fewer_tokens_than_requests_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="max_tokens=4 is less than max_requests=8"):
        InferenceConfig(max_tokens=4, max_requests=8)
