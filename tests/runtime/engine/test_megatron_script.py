"""An engine as Megatron's scripts build and drive it, with the prefix of the imports changed."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from megatron_runtime.contexts.dynamic_context import (
    ContextErrorFactory,
    ContextOverflowError,
    DynamicInferenceContext,
    MaxSequenceLengthOverflowError,
    get_mem_size_str,
)
from megatron_runtime.engines import DynamicInferenceEngine, EngineSuspendedError
from megatron_runtime.engines.dynamic_engine import EngineState
from megatron_runtime.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper
from megatron_runtime.text_generation_controllers.text_generation_controller import TextGenerationController

from megatron_runtime.config import AsyncScheduleMode, CudaGraphSizingDistribution, InferenceConfig
from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine as Engine
from megatron_runtime.errors import ConfigurationError
from megatron_runtime.model.decoder import Decoder
from megatron_runtime.model.tokenizer import Tokenizer
from megatron_runtime.sampling_params import SamplingParams

PROMPTS = ["Water", "is wet"]
PARAMS = SamplingParams(temperature=0, num_tokens_to_generate=5, ignore_eos=True)


def test_the_script_of_dynamic_inference_runs(
    tiny_model: Decoder, byte_tokenizer: Tokenizer, make_engine: Callable[..., Engine]
) -> None:
    config = InferenceConfig(
        block_size_tokens=16,
        kv_cache_memory_bytes=2**20,
        cuda_graph_sizing_distribution=CudaGraphSizingDistribution.EXPONENTIAL,
        async_sched_mode=AsyncScheduleMode.LEGACY,
    )
    context = DynamicInferenceContext(tiny_model.config, config)
    wrapped_model = GPTInferenceWrapper(tiny_model, context)
    controller = TextGenerationController(wrapped_model, byte_tokenizer)
    engine = DynamicInferenceEngine(controller, context)
    assert engine.controller.inference_wrapped_model.model is tiny_model
    engine.reset()
    assert engine.capture_stats is None
    for request_id, prompt in enumerate(PROMPTS):
        engine.add_request(request_id, prompt, PARAMS)
    finished = {}
    while engine.has_unfinished_requests():
        result = engine.step_modern()
        for record in result["finished_request_records"]:
            finished[record.request_id] = record.merge()
    assert engine.context.step_count == 5
    expected = [record.merge().generated_tokens for record in make_engine().generate(PROMPTS, PARAMS)]
    assert [finished[number].generated_tokens for number in range(2)] == expected


def test_a_suspended_engine_refuses_a_step(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    engine.suspend()
    assert engine.state is EngineState.SUSPENDED
    with pytest.raises(EngineSuspendedError):
        engine.step_modern()


def test_a_context_of_another_type_than_the_model_is_refused(tiny_model: Decoder, byte_tokenizer: Tokenizer) -> None:
    config = InferenceConfig(kv_cache_memory_bytes=2**20)
    context = DynamicInferenceContext(tiny_model.config, config, dtype=torch.bfloat16)
    with pytest.raises(ConfigurationError, match="inference_context has keys"):
        TextGenerationController(GPTInferenceWrapper(tiny_model, context), byte_tokenizer)


def test_a_model_of_another_library_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="model_config is a SimpleNamespace"):
        DynamicInferenceContext(SimpleNamespace(num_layers=2), InferenceConfig())
    with pytest.raises(ConfigurationError, match="model is a Linear"):
        GPTInferenceWrapper(torch.nn.Linear(2, 2))


def test_a_context_with_the_config_of_megatron_is_allocated_with_its_engine(
    tiny_model: Decoder, byte_tokenizer: Tokenizer
) -> None:
    transformer = SimpleNamespace(num_layers=2, num_attention_heads=4, kv_channels=16)
    context = DynamicInferenceContext(transformer, InferenceConfig(kv_cache_memory_bytes=2**20))
    assert not context.is_allocated
    controller = TextGenerationController(GPTInferenceWrapper(tiny_model, context), byte_tokenizer)
    engine = DynamicInferenceEngine(controller, context)
    assert context.is_allocated
    assert (context.kv_cache.dtype, context.device) == (tiny_model.dtype, tiny_model.device)
    assert engine.generate(["Water"], PARAMS)[0].merge().succeeded()


def test_errors_of_requests_become_dicts_and_back() -> None:
    error = MaxSequenceLengthOverflowError(7, "too long")
    sent = ContextErrorFactory.serialize(error)
    assert sent == {
        "type": "MaxSequenceLengthOverflowError",
        "request_id": 7,
        "message": "too long",
        "is_transient": False,
    }
    back = ContextErrorFactory.deserialize(sent)
    assert (type(back), back.request_id, back.message) == (MaxSequenceLengthOverflowError, 7, "too long")
    assert isinstance(back, ContextOverflowError)
    with pytest.raises(KeyError, match="EngineError"):
        ContextErrorFactory.deserialize({"type": "EngineError", "message": "other"})


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 bytes"), (1000, "1000 bytes"), (1536, "1.5 KB"), (5 * 2**30, "5 GB"), (-(2**20), "-1 MB")],
)
def test_sizes_are_shown_in_their_unit(size: int, text: str) -> None:
    assert get_mem_size_str(size) == text
