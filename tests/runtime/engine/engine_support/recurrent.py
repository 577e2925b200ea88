"""Small models with recurrent layers, and engines over them."""

from __future__ import annotations

from typing import Any

import torch
from engine_support.random_llama import random_llama

from megatron_runtime.config import InferenceConfig
from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.model.decoder import Decoder
from megatron_runtime.model.kv_cache import KVCache
from megatron_runtime.model.recurrent_config import GatedDeltaConfig, Mamba2Config
from megatron_runtime.model.tokenizer import Tokenizer

BLOCK = 4
DELTA = {"recurrent": GatedDeltaConfig(frozenset({0}), key_heads=2, value_heads=4, key_dim=8, value_dim=8, taps=3)}
MAMBA = {
    "recurrent": Mamba2Config(frozenset({0}), key_heads=2, value_heads=4, key_dim=8, value_dim=8, taps=3),
    "num_layers": 3,
    "feed_forward_layers": frozenset({1}),
}


KINDS: dict[str, dict[str, Any]] = {"gated-delta": DELTA, "mamba": MAMBA}


def recurrent_model(**features: Any) -> Decoder:
    """A model with random weights and these layers."""
    model = random_llama(hidden=32, intermediate=48, std=0.3, **features)
    model.prepare()
    return model


def state_bytes(model: Decoder) -> int:
    """Bytes of the states of one sequence."""
    assert model.config.recurrent is not None
    return model.config.recurrent.state_bytes


def engine_of(
    model: Decoder, tokenizer: Tokenizer, *, snapshots: int, blocks: int = 64, max_requests: int = 8, **settings: Any
) -> DynamicInferenceEngine:
    """An engine with this number of blocks, and with a prefix cache if there are ``snapshots``.

    Snapshots get at most a quarter of what the states of the requests leave.
    """
    block, state = KVCache.block_bytes(model.config, BLOCK, torch.float32), state_bytes(model)
    memory = max_requests * state + blocks * block + snapshots * state
    defaults = {
        "block_size_tokens": BLOCK,
        "kv_cache_memory_bytes": memory,
        "enable_prefix_caching": snapshots > 0,
        "max_sequence_length": blocks * BLOCK,
    }
    config = InferenceConfig(max_requests=max_requests, **{**defaults, **settings})
    engine = DynamicInferenceEngine.build(model, tokenizer, config)
    found = engine.context.limits
    assert not snapshots or (found.num_blocks, found.num_snapshots) == (blocks, snapshots)
    return engine
