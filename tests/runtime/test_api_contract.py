"""Names and parameters that code for Megatron's inference APIs uses."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from megatron_runtime import inference_request
from megatron_runtime.apis.async_llm import MegatronAsyncLLM
from megatron_runtime.apis.llm import MegatronLLM
from megatron_runtime.apis.serve_config import ServeConfig
from megatron_runtime.data_parallel_inference_coordinator import DataParallelInferenceCoordinator
from megatron_runtime.errors import ConfigurationError
from megatron_runtime.inference_client import InferenceClient
from megatron_runtime.inference_request import DynamicInferenceRequest, DynamicInferenceRequestRecord
from megatron_runtime.sampling_params import SamplingParams

COORDINATOR = [
    "data_parallel_size",
    "tokenizer",
    "inference_coordinator_port",
    "deterministic_mode",
    "block_size_tokens",
    "enable_prefix_caching",
    "prefix_caching_coordinator_policy",
    "schedule_output_path",
]
LLM = ["model", "tokenizer", "inference_config", "use_coordinator", "coordinator_host", "coordinator_port"]
LIFECYCLE = ["pause", "unpause", "suspend", "resume", "shutdown", "wait_for_shutdown"]


def parameters(function: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


@pytest.mark.parametrize("kind", [MegatronLLM, MegatronAsyncLLM])
def test_the_llm_classes_have_their_methods_and_parameters(kind: type) -> None:
    signature = inspect.signature(kind)
    assert list(signature.parameters) == LLM
    assert all(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in signature.parameters.values())
    assert signature.parameters["use_coordinator"].default is False
    assert parameters(kind.generate) == ["prompts", "sampling_params", "multi_modal_data"]
    assert parameters(kind.submit) == parameters(kind.run_sync) == ["coro"]
    assert parameters(kind.serve) == ["serve_config", "blocking"]
    assert inspect.signature(kind.serve).parameters["blocking"].default is True
    for name in [*LIFECYCLE, "generate", "serve"]:
        method = getattr(kind, name)
        assert inspect.iscoroutinefunction(method) == (kind is MegatronAsyncLLM)
        assert name not in LIFECYCLE or parameters(method) == []
    for name in ("engine", "context", "controller", "is_primary_rank"):
        assert isinstance(getattr(kind, name), property)


def test_sampling_params_have_the_positional_order_of_megatron() -> None:
    params = SamplingParams(
        0.5, 7, 0.9, True, True, False, 20, None, 5, 3, None, True, ["end"], True, True, True, 2, False
    )
    given = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.9,
        "return_log_probs": True,
        "skip_prompt_log_probs": True,
        "return_segments": False,
        "num_tokens_to_generate": 20,
        "num_tokens_total": None,
        "termination_id": 5,
        "top_n_logprobs": 3,
        "return_prompt_top_n_logprobs": False,
        "add_BOS": True,
        "stop_words": ["end"],
        "detokenize_stop_sequence": True,
        "return_prompt_tokens": True,
        "streaming": True,
        "streaming_interval": 2,
        "do_kv_handoff": False,
    }
    assert {name: getattr(params, name) for name in given} == given
    params.add_attributes({"temperature": 0.0, "top_k": 1})
    assert (params.temperature, params.top_k, params.top_p) == (0.0, 1, 0.9)


def test_the_serve_config_has_its_defaults() -> None:
    config = ServeConfig()
    assert (config.host, config.port, config.parsers) == ("0.0.0.0", 5000, [])
    assert (config.verbose, config.frontend_replicas) == (False, 4)


def test_the_serve_config_accepts_one_parser_of_each_kind() -> None:
    assert ServeConfig(parsers=["qwen3", "hermes"]).http.parsers == ("qwen3", "hermes")
    with pytest.raises(ConfigurationError, match="'gpt' is unknown; use hermes, "):
        ServeConfig(parsers=["gpt"])
    with pytest.raises(ConfigurationError, match="hermes and mistral have the same purpose"):
        ServeConfig(parsers=["hermes", "mistral"])


@pytest.mark.parametrize("address", [{"inference_coordinator_port": 5557}, {"inference_coordinator_address": 5557}])
def test_the_client_accepts_a_port_by_either_name(address: dict[str, int]) -> None:
    assert InferenceClient(**address)._dealer.address == InferenceClient(5557)._dealer.address


@pytest.mark.parametrize("addresses", [{}, {"inference_coordinator_address": 1, "inference_coordinator_port": 1}])
def test_the_client_requires_exactly_one_address(addresses: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError, match="give either"):
        InferenceClient(**addresses)


def test_the_client_has_its_methods_and_attributes() -> None:
    assert parameters(InferenceClient.add_request)[:2] == ["prompt", "sampling_params"]
    assert parameters(InferenceClient.start) == ["loop"]
    assert parameters(InferenceClient._send_signal_to_engines)[:1] == ["signal"]
    for name in ("pause", "unpause", "suspend", "resume", "stop"):
        function = getattr(InferenceClient, f"{name}_engines")
        assert all(item.default is None for item in list(inspect.signature(function).parameters.values())[1:])
    client = InferenceClient(5557)
    assert (client.context, client.socket) == (client._dealer.context, client._dealer.socket)
    assert client.socket is not None
    assert client.listener_task is None
    assert (client.completion_futures, client.next_request_id) == ({}, 0)
    client.stop()


def test_the_coordinator_has_its_methods_and_parameters() -> None:
    assert parameters(DataParallelInferenceCoordinator)[: len(COORDINATOR) + 1] == ["pipe_connection", *COORDINATOR]
    entrypoint = parameters(DataParallelInferenceCoordinator.entrypoint)
    assert entrypoint == ["pipe_connection", "ready_event", *COORDINATOR, "options"]
    states = [state.name for state in DataParallelInferenceCoordinator.CoordinatorState]
    assert states == ["RUNNING", "PAUSED", "SUSPENDED", "STOPPING"]
    expected = {
        "get_next_data_parallel_rank": [],
        "_remove_engine": ["identity"],
        "_send_to_engine": ["identity", "payload"],
        "compute_request_hashes": ["prompt"],
        "get_best_data_parallel_rank": ["request_hashes"],
        "_update_rank_hashes": ["rank_identity", "request_hashes"],
        "start": [],
        "detokenize": ["finished_request"],
        "stop": [],
    }
    for name, wanted in expected.items():
        assert parameters(getattr(DataParallelInferenceCoordinator, name)) == wanted
    for name in ("router_socket", "identities_of_data_parallel_ranks", "next_request_id"):
        assert isinstance(getattr(DataParallelInferenceCoordinator, name), property)


def test_the_request_module_has_its_names() -> None:
    named = "Status InferenceRequest DynamicInferenceEventType DynamicInferenceEvent DynamicInferenceRequest"
    functions = "serialize_tensor deserialize_tensor compute_block_hashes_batched HASH_PRIME HASH_BASE"
    for name in [*named.split(), *functions.split(), "DynamicInferenceRequestRecord", "VLMInferenceRequest"]:
        assert hasattr(inference_request, name), name
    events = "add_engine add_context generated_token pause evict finish fail error_transient error_nontransient"
    for event in events.split():
        assert callable(getattr(DynamicInferenceRequest, f"add_event_{event}"))
    assert parameters(DynamicInferenceRequest.add_event) == ["type", "payload"]
    assert parameters(DynamicInferenceRequestRecord.increment_staleness) == ["policy_only"]
    assert parameters(DynamicInferenceRequestRecord.checkpoint) == ["tokenizer"]
    assert parameters(DynamicInferenceRequestRecord.merge) == ["tokenizer"]
