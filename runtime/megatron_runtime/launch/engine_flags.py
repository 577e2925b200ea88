"""The flags of ``megatron-serve`` for the checkpoint and the engines."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from megatron_runtime.launch.lora_modules import parse_modules
from megatron_runtime.launch.options import EngineOptions, ModelSource
from megatron_runtime.launch.quantity import parse_bytes


@dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """Where the checkpoint is."""

    model: Annotated[Path | None, typer.Option(help="A .gguf file or a checkpoint folder.")] = None
    hf_repo: Annotated[str | None, typer.Option(help="A repository on the Hugging Face hub instead.")] = None
    hf_file: Annotated[
        str | None, typer.Option(help="A .gguf file of the repository. Default: the whole repository.")
    ] = None
    hf_revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of the repository.")] = None

    def source(self) -> ModelSource:
        """The same as options."""
        return ModelSource(self.model, self.hf_repo, self.hf_file, self.hf_revision)


@dataclass(frozen=True, kw_only=True)
class EngineFlags:
    """The engine of each replica group; fields but adapters and amounts of memory are those of EngineOptions."""

    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = EngineOptions.dtype
    quantized_weights: Annotated[
        str,
        typer.Option(
            help="expand: convert them to the dtype. keep: compute with them as they are, which takes less memory. On a"
            " CPU, those of GGUF files, and int4 and int8 in safetensors, which is faster, but rounds the inputs of"
            " products to int8; on a GPU, fp8 in safetensors, without rounding inputs."
        ),
    ] = EngineOptions.quantized_weights
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = EngineOptions.device
    max_sequence_length: Annotated[
        int | None, typer.Option(help="Maximum length of a prompt and its answer, in tokens.")
    ] = None
    tensor_parallel: Annotated[int, typer.Option(help="Ranks that share each layer.")] = EngineOptions.tensor_parallel
    pipeline_parallel: Annotated[int, typer.Option(help="Stages that the layers are divided into.")] = (
        EngineOptions.pipeline_parallel
    )
    expert_parallel: Annotated[int, typer.Option(help="Parts that the experts of a layer are divided into.")] = (
        EngineOptions.expert_parallel
    )
    block_size_tokens: Annotated[int, typer.Option(help="Tokens per block of the KV cache.")] = (
        EngineOptions.block_size_tokens
    )
    kv_cache_memory: Annotated[
        str | None,
        typer.Option(
            help="Size of the KV cache per rank, like 20Gi. Default: up to 1Gi on a CPU; on a GPU 0.9 of what the"
            " weights and the largest pass leave."
        ),
    ] = None
    kv_cache_dtype: Annotated[
        str,
        typer.Option(
            help="Keys and values. auto: the dtype. fp8: rounded to E4M3, which halves their memory, on a GPU of"
            " compute capability 8.9 or newer."
        ),
    ] = EngineOptions.kv_cache_dtype
    attention_backend: Annotated[
        str,
        typer.Option(
            help="auto: the attention of this project. flashinfer: that of the package flashinfer-python, on a GPU, in"
            " float16 or bfloat16, without CUDA graphs."
        ),
    ] = EngineOptions.attention_backend
    device_memory: Annotated[
        str | None,
        typer.Option(help="Memory of each GPU, like 80Gi, for the check before the start. Default: as of nvidia-smi."),
    ] = None
    max_requests: Annotated[int | None, typer.Option(help="Maximum number of requests in one forward pass.")] = None
    num_cuda_graphs: Annotated[
        int | None,
        typer.Option(
            help="Number of sizes of passes without prompts, and of passes with prompts up to 512 tokens, that are CUDA"
            " graphs; 0: none; -1: all. Default: on a GPU all, where the model permits it."
        ),
    ] = None
    batch_invariant: Annotated[
        bool,
        typer.Option(
            "--batch-invariant",
            help="On a GPU, keep the bits of answers independent of other requests, which takes longer.",
        ),
    ] = EngineOptions.batch_invariant
    num_speculative_tokens: Annotated[
        int,
        typer.Option(
            help="Maximum number of tokens that a step verifies for a request besides its next one; they are copied"
            " from its earlier tokens, or drafted by a model, and change no answer. 0: none."
        ),
    ] = EngineOptions.num_speculative_tokens
    speculative_draft_model: Annotated[
        str | None,
        typer.Option(
            help="A .gguf file or a checkpoint folder of a small model with the same vocabulary, which drafts these"
            " tokens. Default: they are copied."
        ),
    ] = EngineOptions.speculative_draft_model
    mamba_memory_ratio: Annotated[
        float | None,
        typer.Option(
            help="Most of the KV cache's memory, between 0 and 1, for the recurrent states of running requests."
            " Default: half of it, or those of --max-requests. Only for models with recurrent layers."
        ),
    ] = None
    prefix_caching: Annotated[bool, typer.Option(help="Reuse the KV cache of equal prompt prefixes.")] = (
        EngineOptions.prefix_caching
    )
    prefix_caching_mamba_gb: Annotated[
        float | None,
        typer.Option(
            help="GiB of the KV cache's memory for copies of recurrent states at the ends of cached prefixes; 0: no"
            " prefix caching of models with recurrent layers. Default: chosen by the engine. Other models have none."
        ),
    ] = None
    chunked_prefill: Annotated[bool, typer.Option(help="Split long prompts over several steps.")] = (
        EngineOptions.chunked_prefill
    )
    kv_cache_management: Annotated[
        str, typer.Option(help="What suspend does with the KV cache: persist, offload or recompute.")
    ] = EngineOptions.kv_cache_management
    offload_weights: Annotated[bool, typer.Option(help="Suspend moves the weights to host memory.")] = (
        EngineOptions.offload_weights
    )
    logprobs_mode: Annotated[
        str,
        typer.Option(help="raw_logprobs: of the model; processed_logprobs: of the distribution that is sampled."),
    ] = EngineOptions.logprobs_mode
    moe_enable_routing_replay: Annotated[
        bool, typer.Option("--moe-enable-routing-replay", help="Return the experts of each token with the answer.")
    ] = EngineOptions.moe_enable_routing_replay
    lora_modules: Annotated[
        list[str] | None,
        typer.Option(
            help='A LoRA adapter as name=folder, or as {"name": ..., "path": ...}; may be repeated. Requests name it as'
            " their model."
        ),
    ] = None
    max_loras: Annotated[int, typer.Option(help="Maximum number of LoRA adapters that are loaded at once.")] = (
        EngineOptions.max_loras
    )
    max_lora_rank: Annotated[int, typer.Option(help="Largest r of a LoRA adapter.")] = EngineOptions.max_lora_rank
    grammar_cache_memory: Annotated[
        str,
        typer.Option(
            help="Most memory, about, of compiled grammars that are kept for waiting and later requests, like 96Mi."
        ),
    ] = "96Mi"
    check_finite: Annotated[bool, typer.Option("--check-finite", help="Refuse weights with NaN or infinity.")] = (
        EngineOptions.check_finite
    )

    def options(self) -> EngineOptions:
        """The same as options; ConfigurationError names a flag whose value can't be parsed."""
        values = dict(vars(self))
        cache = _bytes_or_none(values.pop("kv_cache_memory"), "--kv-cache-memory")
        device = _bytes_or_none(values.pop("device_memory"), "--device-memory")
        values["grammar_cache_bytes"] = parse_bytes(values.pop("grammar_cache_memory"), "--grammar-cache-memory")
        adapters = parse_modules(values.pop("lora_modules") or [])
        return EngineOptions(kv_cache_bytes=cache, device_memory_bytes=device, lora_modules=adapters, **values)


def _bytes_or_none(text: str | None, flag: str) -> int | None:
    return None if text is None else parse_bytes(text, flag)
