"""The memory of a suspended engine."""

from __future__ import annotations

import torch
from runtime_support.byte_backend import END, byte_backend

from gpu_checks.results import DEVICE, Result, Sizes
from megatron_runtime.config import InferenceConfig, KVCacheManagementMode
from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.model.decoder import Decoder
from megatron_runtime.model.tokenizer import Tokenizer

NEEDED = 0.95


def check_suspended(model: Decoder, sizes: Sizes) -> Result:
    """The share of the KV cache that the driver has back after `suspend`, and that is allocated after `resume`."""
    engine = DynamicInferenceEngine.build(
        model,
        Tokenizer(byte_backend(), location="bytes", eod=END),
        InferenceConfig(
            kv_cache_memory_bytes=sizes.cache_bytes,
            max_sequence_length=sizes.model["max_position_embeddings"],
            kv_cache_management_mode=KVCacheManagementMode.OFFLOAD,
        ),
    )
    size = engine.context.kv_cache.num_bytes
    assert size > sizes.cache_bytes / 2, f"a cache of {size} bytes shows nothing"
    before = free_bytes(engine, sizes)
    engine.suspend()
    suspended = free_bytes(engine, sizes)
    engine.resume()
    given_back, taken = suspended - before, suspended - free_bytes(engine, sizes)
    words = f"{given_back / size:.1%} of {size / 1e9:.3g} GB, {taken / size:.1%} taken again"
    is_wrong = min(given_back, taken) < NEEDED * size
    return Result("KV cache given back on suspend", words, f"{NEEDED:.0%}", is_wrong=is_wrong)


def free_bytes(engine: DynamicInferenceEngine, sizes: Sizes) -> int:
    """Of the GPU, as its driver reports it; without a GPU, those of a cache that is not allocated."""
    if not sizes.has_gpu:
        cache = engine.context.kv_cache
        return 0 if cache.is_resident else cache.num_bytes
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(DEVICE)
    return free
