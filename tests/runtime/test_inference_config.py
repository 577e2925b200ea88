"""The engine's configuration: defaults, and errors that name the field."""

from __future__ import annotations

import logging
from dataclasses import fields

import pytest

from megatron_runtime.config import InferenceConfig, KVCacheManagementMode
from megatron_runtime.errors import ConfigurationError
from megatron_runtime.unavailable_settings import UnavailableSettings

ASKED_FOR = {
    "mamba_inference_state_config": object(),
    "unified_memory_level": 1,
    "pg_collection": object(),
    "image_preprocessing_config": {},
    "use_flashinfer_fused_rope": True,
    "request_metadata_types": [],
    "use_synchronous_zmq_collectives": True,
    "disable_ep_consensus": True,
    "ep_consensus_interval": 5,
}
"""A value of every setting of Megatron that this engine does not support."""


def test_the_defaults_are_valid() -> None:
    config = InferenceConfig()
    assert config.block_size_tokens == 16
    assert config.pool_bytes("cuda") == 20 * 2**30
    assert config.pool_bytes("cpu") == 2 * 2**30


def test_a_size_in_bytes_overrides_one_in_gigabytes() -> None:
    assert InferenceConfig(buffer_size_gb=0.5).pool_bytes("cpu") == 2**29
    assert InferenceConfig(buffer_size_gb=0.5, kv_cache_memory_bytes=77).pool_bytes("cuda") == 77


def test_a_mode_can_be_set_by_its_name() -> None:
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
        ("sampling_backend", "numpy"),
        ("paused_buffer_size_gb", -1),
        ("track_paused_request_events", 1),
        ("enable_chunked_prefill", 1),
        ("enable_prefix_caching", "yes"),
        ("offload_weights", None),
        ("track_generated_token_events", 0),
        ("materialize_only_last_token_logits", 1),
        ("static_kv_memory_pointers", "no"),
        ("num_cuda_graphs", -2),
        ("num_cuda_graphs", True),
        ("num_cuda_graphs", 0.0),
        ("cuda_graph_sizing_distribution", "cubic"),
        ("async_sched_mode", "serial"),
        ("async_sched_mode", None),
        ("cuda_graph_max_tokens", 0),
        ("use_cuda_graphs_for_non_decode_steps", 1),
        ("cuda_graph_mixed_prefill_count", -1),
        ("cuda_graph_all_prefills", "no"),
        ("batch_invariant", "yes"),
        ("mamba_memory_ratio", 0),
        ("mamba_memory_ratio", 1.0),
        ("mamba_memory_ratio", "half"),
        ("mamba_memory_ratio", float("nan")),
        ("prefix_caching_mamba_gb", -1),
        ("prefix_caching_mamba_gb", True),
        ("prefix_caching_mamba_gb", float("inf")),
    ],
)
def test_an_invalid_value_is_refused_and_its_field_is_named(field: str, value: object) -> None:
    with pytest.raises(ConfigurationError, match=f"{field}={value!r}") as refusal:
        InferenceConfig(**{field: value})
    assert refusal.value.field == field


def test_fewer_tokens_than_requests_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="max_tokens=4 is less than max_requests=8"):
        InferenceConfig(max_tokens=4, max_requests=8)


@pytest.mark.parametrize(("field", "value"), ASKED_FOR.items())
def test_an_unsupported_setting_is_refused(field: str, value: object) -> None:
    with pytest.raises(ConfigurationError, match=rf"^{field}=.*: .*; leave it out, or set ") as refusal:
        InferenceConfig(**{field: value})
    assert refusal.value.field == field


def test_every_unsupported_setting_is_refused_except_its_neutral_value() -> None:
    names = {field.name for field in fields(UnavailableSettings)}
    assert names == ASKED_FOR.keys()
    defaults = InferenceConfig()
    assert InferenceConfig(**{name: getattr(defaults, name) for name in names}) == defaults


def test_another_sampling_backend_falls_back_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="sampling_backend='flashinfer' is not available; using 'torch'"):
        assert InferenceConfig(sampling_backend="flashinfer").sampling_backend == "torch"


def test_a_verbose_configuration_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    InferenceConfig(max_requests=77)
    assert "max_requests=77" not in caplog.text
    InferenceConfig(max_requests=77, verbose=True)
    assert "max_requests=77" in caplog.text


@pytest.mark.parametrize("value", [True, False])
def test_the_offset_of_seeds_is_accepted_as_megatron_sets_it(value: bool) -> None:
    assert InferenceConfig().offset_sampling_seed_by_dp_rank
    assert InferenceConfig(offset_sampling_seed_by_dp_rank=value).offset_sampling_seed_by_dp_rank is value
