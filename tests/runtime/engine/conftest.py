"""A tiny model with random weights, a byte-level tokenizer, and a reference without a cache."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from runtime_support.byte_backend import END, byte_backend

from megatron_runtime.config import InferenceConfig
from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.model.decoder import Decoder
from megatron_runtime.model.forward_batch import ForwardBatch
from megatron_runtime.model.kv_cache import KVCache
from megatron_runtime.model.tokenizer import Tokenizer

HERE = Path(__file__).parent
if str(HERE) not in sys.path:
    sys.path.append(str(HERE))  # for engine_support; pytest's importlib mode does not add it

from engine_support.random_llama import random_llama  # noqa: E402

BLOCK = 4
"""Tokens per block in these tests: small, so that block boundaries are frequent."""
NO_TIME = 0.0
"""Of all passes, so that drafts are permitted whatever they cost here."""


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def byte_tokenizer() -> Tokenizer:
    """Every byte is a token; 256 is the end of text."""
    return Tokenizer(byte_backend(), location="bytes", eod=END)


@pytest.fixture(scope="session")
def tiny_model() -> Decoder:
    """Two layers of random weights that make the most likely token unambiguous."""
    model = random_llama(hidden=32, intermediate=64, std=0.4)
    assert model.head is not None
    model.head.table.data[END] = 0.0
    return model


@pytest.fixture(scope="session")
def naive_logits(tiny_model: Decoder) -> Callable[[list[int]], torch.Tensor]:
    """``naive_logits(tokens)``: [len(tokens), vocab] from a single pass."""

    def compute(tokens: list[int]) -> torch.Tensor:
        count = len(tokens)
        batch = ForwardBatch(
            tokens=torch.tensor(tokens),
            positions=torch.arange(count),
            slots=torch.arange(count),
            query_starts=torch.tensor([0, count], dtype=torch.int32),
            context_lengths=torch.tensor([count], dtype=torch.int32),
            block_tables=torch.zeros(1, 1, dtype=torch.int32),
            logit_rows=torch.arange(count),
        )
        return tiny_model(batch, KVCache(tiny_model.config, 1, max(count, 1), torch.float32))

    return compute


@pytest.fixture(scope="session")
def naive_greedy(naive_logits: Callable[[list[int]], torch.Tensor]) -> Callable[[list[int], int], list[int]]:
    """``naive_greedy(prompt, n)``: the n greedy tokens, each from a single pass over all tokens."""

    def generate(prompt: list[int], count: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(naive_logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]

    return generate


@pytest.fixture
def make_engine(tiny_model: Decoder, byte_tokenizer: Tokenizer) -> Callable[..., DynamicInferenceEngine]:
    """``make_engine(blocks=64, clock=None, **settings)``: an engine over the tiny model with a pool of this number of
    blocks. Without a clock, its passes take no time."""

    def make(blocks: int = 64, clock: Callable[[], float] | None = None, **settings: object) -> DynamicInferenceEngine:
        block_bytes = KVCache.block_bytes(tiny_model.config, BLOCK, torch.float32)
        config = InferenceConfig(
            **{"block_size_tokens": BLOCK, "kv_cache_memory_bytes": blocks * block_bytes, **settings}
        )
        engine = DynamicInferenceEngine.build(tiny_model, byte_tokenizer, config)
        engine.context.clock = clock or (lambda: NO_TIME)
        return engine

    return make
