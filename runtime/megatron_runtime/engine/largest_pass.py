"""The memory that the largest pass needs, measured before the KV cache gets the rest.

The measurement reads the counters of PyTorch's allocator and of the driver. No test covers these two readings, which
need a GPU, and only `make gpu` does; the pass itself runs on any device.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from megatron_runtime.config import CUDA_SHARE, InferenceConfig
from megatron_runtime.engine.context import LogProbRows
from megatron_runtime.engine.context_limits import ContextLimits
from megatron_runtime.engine.graph_sizes import graph_sizes, most_rows
from megatron_runtime.engine.pass_graphs import buffer_bytes
from megatron_runtime.engine.sampling.exponential_noise import noise_keys
from megatron_runtime.engine.sampling.filters.truncations import TopP
from megatron_runtime.engine.sampling.penalties import penalty_bytes
from megatron_runtime.engine.sampling.sampling_table import SamplingRules
from megatron_runtime.engine.text_generation_controller import TextGenerationController
from megatron_runtime.errors import ConfigurationError
from megatron_runtime.model.device_memory import format_gibibytes, naming_device_memory
from megatron_runtime.model.forward_batch import ForwardBatch
from megatron_runtime.model.hidden_pool import HiddenPool
from megatron_runtime.model.kernels.gpu_attention import cache_dtype
from megatron_runtime.model.kv_cache import KVCache
from megatron_runtime.model.routing_tape import RoutingTape

_ANY_SIZE = 2**60
_TOP_N = 20


def measure_kv_cache_memory(controller: TextGenerationController, config: InferenceConfig) -> int:
    """Bytes for the KV cache of this rank: 0.9 of what its weights and the largest pass leave of its GPU.

    All ranks of a replica group call this together, because a pass of one needs the others.

    Raises:
        ConfigurationError: Too little is left; names the sizes and the remedy.
    """
    device = controller.model.device
    limits = largest_limits(controller, config)
    with naming_device_memory("in a pass of the largest size", device):
        cached = cache_dtype(config.kv_cache_dtype, controller.model.config, controller.model.dtype, device)
        eager = limits_of_eager_passes(config, limits)
        largest = _bytes_of_pass(controller, eager, cached, records_routing=config.moe_enable_routing_replay)
        if captured := limits_of_graphs(config, limits):
            largest += _bytes_of_pass(controller, captured, cached) + buffer_bytes(
                captured, controller.model.config.vocab_size
            )
    largest += penalty_bytes(limits.max_requests, limits.max_sequence_length)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return share_for_kv_cache(free, total, largest)


def _bytes_of_pass(
    controller: TextGenerationController, limits: ContextLimits, cached: torch.dtype, *, records_routing: bool = False
) -> int:
    device = controller.model.device
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run_largest_pass(controller, limits, cached, records_routing=records_routing)
    controller.model.ranks.await_device()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def share_for_kv_cache(free: int, total: int, largest_pass: int) -> int:
    """The bytes for the KV cache, from the free and the total bytes of a GPU with the weights on it.

    Raises:
        ConfigurationError: Nothing is left.
    """
    left = int((free - largest_pass) * CUDA_SHARE)
    if left <= 0:
        raise ConfigurationError(
            f"--kv-cache-memory: nothing is left for the KV cache: of the GPU's {format_gibibytes(total)}, weights and "
            f"other programs use {format_gibibytes(total - free)}, and the largest pass needs "
            f"{format_gibibytes(largest_pass)}; use a smaller --dtype, a lower --max-requests, more ranks with "
            "--tensor-parallel or --pipeline-parallel, or a GPU with more memory",
            field="kv_cache_memory_bytes",
        )
    return left


def largest_limits(controller: TextGenerationController, config: InferenceConfig) -> ContextLimits:
    """The limits of a pass if the KV cache is no limit."""
    model = controller.model
    return ContextLimits.derive(
        model.shard.largest_cache_config,
        replace(config, kv_cache_memory_bytes=_ANY_SIZE),
        dtype=cache_dtype(config.kv_cache_dtype, model.config, model.dtype, model.device),
        device_type=model.device.type,
    )


def limits_of_eager_passes(config: InferenceConfig, limits: ContextLimits) -> ContextLimits:
    """The limits of a pass in which each draft is a request of its own."""
    return replace(limits, max_requests=most_rows(config, limits.max_requests, limits.max_tokens))


def limits_of_graphs(config: InferenceConfig, limits: ContextLimits) -> ContextLimits | None:
    """The limits of a pass with as many tokens and requests as CUDA graphs have; None without graphs.

    All graphs share memory of their own, as much as the largest of them needs.
    """
    if not (sizes := graph_sizes(config, limits.max_requests, limits.max_tokens)):
        return None
    tokens, requests = (max(each) for each in zip(*sizes, strict=True))
    return replace(limits, max_requests=requests, max_tokens=tokens, prompt_logits=0)


@torch.inference_mode()
def run_largest_pass(
    controller: TextGenerationController,
    limits: ContextLimits,
    cached: torch.dtype | None = None,
    *,
    records_routing: bool = False,
) -> None:
    """Run a pass with as many requests and tokens as the limits allow, and sample with all features; ``cached`` is the
    type of keys and values, None: that of the weights.

    Most requests have one token. The last ones have the rest of the tokens, at the end of the longest contexts. All
    of them share a few blocks, so the pass needs no KV cache of its size. The copies of keys and values that attention
    in plain PyTorch makes of many long contexts are not included.
    """
    model = controller.model
    blocks = -(-limits.max_tokens // limits.block_size_tokens)
    cache = KVCache(
        *(model.shard.cache_config, min(blocks, 64), limits.block_size_tokens, cached or model.dtype, model.device),
        num_states=limits.max_requests,
    )
    batch, sampled_rows = _largest_batch(limits, cache.num_blocks, model.device)
    tape = RoutingTape() if records_routing else None
    if not model.ranks.has_logits:
        model(batch, cache, tape)
        return
    rows = len(batch.context_lengths)
    rules = SamplingRules(
        temperature=np.ones(rows, np.float32),
        keys=noise_keys(np.arange(rows, dtype=np.uint64), np.zeros(rows, np.int64)),
        # So much of the probability that all tokens have to be ranked.
        truncations=(TopP.of(np.full(rows, 0.999, np.float32)),),
    )
    assert batch.logit_rows is not None
    every = torch.arange(len(batch.logit_rows), device=model.device)
    sampled = torch.full_like(every, -1)
    sampled[sampled_rows] = torch.arange(rows, device=model.device)
    top_n = min(_TOP_N, model.config.vocab_size)
    wanted = LogProbRows(rows=every, targets=torch.zeros_like(every), sampled=sampled, top_n=top_n)
    tokens = torch.arange(len(batch.tokens), device=model.device)
    pool = HiddenPool(tokens, torch.zeros_like(tokens), 1)
    controller.run(batch, cache, rules, sampled_rows, wanted, tape, pool)


def _largest_batch(limits: ContextLimits, num_blocks: int, device: torch.device) -> tuple[ForwardBatch, Tensor]:
    """The batch, and the rows of its logits that are sampled: the others are those of prompts."""
    requests, more = limits.max_requests, limits.max_sequence_length - 1
    lengths = 1 + np.clip(limits.max_tokens - requests - more * np.arange(requests)[::-1], 0, more)
    contexts = np.where(lengths > 1, limits.max_sequence_length, 1)
    contexts[-1] = limits.max_sequence_length
    query_starts = np.concatenate(([0], lengths.cumsum()))
    parts = zip(contexts, lengths, strict=True)
    positions = np.concatenate([np.arange(context - length, context) for context, length in parts])
    tables = np.tile(np.arange(limits.max_blocks_per_sequence) % num_blocks, (requests, 1))
    tables[np.arange(tables.shape[1]) >= -(-contexts[:, None] // limits.block_size_tokens)] = 0
    blocks = positions // limits.block_size_tokens % num_blocks
    ends = query_starts[1:] - 1
    others = np.setdiff1d(np.arange(len(positions)), ends)
    logit_rows = np.union1d(ends, others[max(len(others) - limits.prompt_logits, 0) :])
    arrays = {
        "tokens": np.zeros(len(positions), np.int64),
        "positions": positions,
        "slots": blocks * limits.block_size_tokens + positions % limits.block_size_tokens,
        "query_starts": query_starts.astype(np.int32),
        "context_lengths": contexts.astype(np.int32),
        "block_tables": tables.astype(np.int32),
        "logit_rows": logit_rows,
        "state_slots": np.arange(requests),
    }
    tensors = {name: torch.from_numpy(values).to(device) for name, values in arrays.items()}
    sampled_rows = torch.from_numpy(np.searchsorted(logit_rows, ends)).to(device)
    return ForwardBatch(**tensors, adapters=None, host_tables=None), sampled_rows
