"""Serves live models of Megatron Core, which has to be installed, and prints the results of the checks as JSON."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import write_megatron_checkpoints as peer  # its import adapts Megatron to a machine without accelerators
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron_cases import CASES, EXPERTS, LLAMA, SHARED_EXPERT, SIGMOID_ROUTING, Case
from megatron_runtime.contexts.dynamic_context import DynamicInferenceContext
from megatron_runtime.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper
from megatron_runtime.text_generation_controllers.text_generation_controller import TextGenerationController
from runtime_support.byte_backend import END, END_TEXT, byte_backend
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from megatron_runtime.apis import MegatronLLM, from_megatron
from megatron_runtime.config import InferenceConfig
from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.errors import CheckpointError, ConfigurationError
from megatron_runtime.model.decoder import Decoder
from megatron_runtime.model.megatron.sharing import share_tensors
from megatron_runtime.sampling_params import SamplingParams

VOCABULARY = END + 1
PROMPT = [7, 19, 3, 250, 4, 4, 90, 33, 21]
LENGTH = 12
GREEDY = SamplingParams(temperature=0, num_tokens_to_generate=LENGTH, ignore_eos=True)
SERVED: dict[str, Case] = {
    "llama": CASES["apart"],
    "biases": Case(LLAMA, {"add_qkv_bias": True}),
    "gpt2": CASES["gpt2"],
    "experts": CASES["experts"],
    "shared_experts": Case(LLAMA, EXPERTS | SHARED_EXPERT),
    "sigmoid_routing": Case(CASES["sigmoid_routing"].hugging_face, EXPERTS | SIGMOID_ROUTING),
}


def tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=byte_backend(), eos_token=END_TEXT)


def build(case: Case) -> GPTModel:
    """A model over bytes. Large weights separate the most likely token from the others."""
    model = peer.build(case).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter *= 3
    return model


@torch.no_grad()
def greedy(model: GPTModel) -> list[int]:
    """The tokens by Megatron's own forward pass over the whole sequence."""
    tokens = list(PROMPT)
    for _ in range(LENGTH):
        count = len(tokens)
        mask = torch.ones(1, 1, count, count, dtype=torch.bool).triu(1)
        logits = model(torch.tensor([tokens]), torch.arange(count)[None], mask)
        tokens.append(int(logits[0, -1, :VOCABULARY].argmax()))
    return tokens[len(PROMPT) :]


def serve(model: Any) -> DynamicInferenceEngine:
    config = InferenceConfig(kv_cache_memory_bytes=2**20, enable_prefix_caching=True, max_tokens=4)
    return DynamicInferenceEngine.build(*from_megatron(model, tokenizer()), config)


def tokens_of(engine: DynamicInferenceEngine) -> list[int]:
    return engine.generate([PROMPT], GREEDY)[0].merge().generated_tokens


def memory(tensors: Any) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def is_shared(decoder: Decoder, model: GPTModel) -> bool:
    return memory(decoder.parameters()) <= memory([*model.parameters(), *model.buffers()])


@torch.no_grad()
def train(model: GPTModel) -> None:
    """Changes all weights in place."""
    for parameter in model.parameters():
        parameter += 0.3 * torch.randn(parameter.shape)


def like_transformer_engine(model: GPTModel) -> dict[str, Tensor]:
    """The tensors by the names of layers of Transformer Engine, with grouped experts."""
    named: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if not isinstance(tensor, Tensor):
            continue
        name = name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
        if "router" not in "".join(model.state_dict()):
            name = name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
        stem, found, rest = name.partition("local_experts.")
        if found:
            index, rest = rest.split(".", 1)
            name = f"{stem}{rest}{index}"
        named[name] = tensor
    return named


def grouped(model: GPTModel) -> dict[str, Tensor]:
    """The tensors with the experts of a layer in one matrix each, as in Megatron's grouped product."""
    named = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}
    for layer in range(2):
        stem = f"decoder.layers.{layer}.mlp.experts."
        for matrix, grouped_name, dim in (("linear_fc1", "weight1", 1), ("linear_fc2", "weight2", 0)):
            parts = [named.pop(f"{stem}local_experts.{index}.{matrix}.weight").t() for index in range(4)]
            # One expert after the other in memory, whatever the shape says.
            together = torch.stack([part.contiguous() for part in parts])
            named[stem + grouped_name] = together.view(16, -1) if dim else together.view(-1, 16)
    return named


def served_as(model: GPTModel, tensors: dict[str, Tensor]) -> list[int]:
    engine = serve(model)
    engine.controller.model = share_tensors(engine.controller.model.config, tensors)
    engine._passes._controller = engine.controller
    return tokens_of(engine)


def check(case: Case) -> dict[str, Any]:
    model = build(case)
    engine = serve(model)
    found: dict[str, Any] = {
        "expected": greedy(model),
        "served": tokens_of(engine),
        "shared": is_shared(engine.controller.model, model),
        "transformer_engine": served_as(model, like_transformer_engine(model)),
    }
    if "num_moe_experts" in case.transformer and not case.transformer.get("moe_shared_expert_intermediate_size"):
        found["grouped"] = served_as(model, grouped(model))
    train(model)
    engine.invalidate_prefix_cache()
    found |= {"expected_after_training": greedy(model), "served_after_training": tokens_of(engine)}
    return found


def check_refit() -> dict[str, Any]:
    """Another live model for an engine: as a module, as named tensors, and with another type."""
    case = SERVED["llama"]
    first, second = build(case), build(case)
    train(second)
    engine = serve(first)
    model = engine.controller.model
    found: dict[str, Any] = {"before": tokens_of(engine), "expected": greedy(second)}
    found["version"] = engine.update_weights(second)
    found |= {"module": tokens_of(engine), "shared": is_shared(model, second)}
    engine.update_weights(dict(first.named_parameters()))
    engine.update_weights(dict(second.named_parameters()))
    engine.suspend()
    engine.resume()
    found |= {"named": tokens_of(engine), "shared_named": is_shared(model, second)}
    engine.update_weights(build(case).to(torch.bfloat16))
    found["copied"] = str(model.dtype), is_shared(model, first), tokens_of(engine) == found["before"]
    with torch.no_grad():
        first.decoder.final_layernorm.weight[0] = torch.nan
    found["nan"] = error_of(lambda: engine.update_weights(first), CheckpointError)
    return found


def check_llm() -> dict[str, Any]:
    """The live model as Megatron's users pass it."""
    model = build(SERVED["llama"])
    config = InferenceConfig(kv_cache_memory_bytes=2**20)
    with MegatronLLM(model=model, tokenizer=tokenizer(), inference_config=config) as llm:
        (request,) = llm.generate(bytes(PROMPT[:3]).decode("latin-1"), GREEDY)
        (tokens,) = llm.generate([PROMPT], GREEDY)
        assert request.generated_text is not None
    found: dict[str, Any] = {"tokens": tokens.generated_tokens, "expected": greedy(model)}
    with MegatronLLM(model=model, tokenizer=tokenizer(), inference_config=config, use_coordinator=True) as llm:
        llm.pause()
        train(model)
        llm.update_weights(model)
        llm.unpause()
        (request,) = llm.generate([PROMPT], GREEDY)
    return found | {
        "trained_tokens": request.generated_tokens,
        "expected_after_training": greedy(model),
        "version": request.weight_version,
    }


def check_script() -> dict[str, Any]:
    """An engine as Megatron's scripts build it, from context, wrapper and controller."""
    model = build(SERVED["llama"])
    context = DynamicInferenceContext(model.config, InferenceConfig(kv_cache_memory_bytes=2**20))
    controller = TextGenerationController(GPTInferenceWrapper(model, context), tokenizer())
    engine = DynamicInferenceEngine(controller, context)
    shared = is_shared(engine.controller.model, model)
    return {"served": tokens_of(engine), "expected": greedy(model), "shared": shared}


def error_of(act: Callable[[], object], kind: type[Exception]) -> str:
    try:
        act()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


def check_refusals() -> dict[str, str]:
    model = build(SERVED["llama"])
    other = build(SERVED["gpt2"])
    engine = serve(model)

    def with_field(name: str, value: object) -> Callable[[], object]:
        def act() -> object:
            before = getattr(model.config, name)
            setattr(model.config, name, value)
            try:
                return from_megatron(model, tokenizer())
            finally:
                setattr(model.config, name, before)

        return act

    return {
        "ranks": error_of(with_field("tensor_model_parallel_size", 2), ConfigurationError),
        "feature": error_of(with_field("attention_output_gate", True), ConfigurationError),
        "tensor": error_of(with_field("add_qkv_bias", True), CheckpointError),
        "unused": error_of(with_field("qk_layernorm", False), CheckpointError),
        "no_model": error_of(lambda: from_megatron(torch.nn.Linear(2, 2), tokenizer()), ConfigurationError),
        "tokenizer": error_of(lambda: from_megatron(model, object()), ConfigurationError),
        "sizes": error_of(lambda: engine.update_weights(other), CheckpointError),
    }


def main() -> None:
    """One rank, gloo."""
    peer.PADDED_VOCABULARY = 320
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        initialize_rng_tracker(inference_rng_tracker=True)
        found: dict[str, Any] = {name: check(case) for name, case in SERVED.items()}
        found |= {"refit": check_refit(), "llm": check_llm(), "script": check_script(), "refusals": check_refusals()}
        print(json.dumps(found))
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
