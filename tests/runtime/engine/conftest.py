"""A tiny real model with random weights, a byte tokenizer, and an oracle that has no cache."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from megatron_runtime.config import InferenceConfig
from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.model.config import ModelConfig
from megatron_runtime.model.decoder import Decoder
from megatron_runtime.model.forward_batch import ForwardBatch
from megatron_runtime.model.kv_cache import KVCache
from megatron_runtime.model.token_bytes import byte_of_character
from megatron_runtime.model.tokenizer import Tokenizer

HERE = Path(__file__).parent
if str(HERE) not in sys.path:
    sys.path.append(str(HERE))  # engine_support lies here, and importlib mode puts nothing on the path

BLOCK = 4
"""Tokens per block in these tests: small, so that borders are met often."""
END = 256
"""The token that ends an answer."""


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def byte_tokenizer() -> Tokenizer:
    """Every byte is a token; 256 is the end of text."""
    backend = Backend(models.BPE(byte_of_character(), []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<end>", special=True)])
    return Tokenizer(backend, location="bytes", eod=END)


@pytest.fixture(scope="session")
def tiny_model() -> Decoder:
    """Two layers of random weights, wide enough apart that the likeliest token is never in doubt."""
    config = ModelConfig(
        architecture="llama",
        vocab_size=257,
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_attention_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        tie_word_embeddings=False,
    )
    model = Decoder(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(3)
    tables, others = (model.embedding.table, model.head.table), (model.layers, model.head.norm)
    for parameter in (*tables, *(parameter for module in others for parameter in module.parameters())):
        if parameter.dim() == 1:
            parameter.data.fill_(1.0)
        else:
            parameter.data.normal_(std=0.4, generator=generator)
    model.head.table.data[END] = 0.0
    return model


@pytest.fixture(scope="session")
def naive_logits(tiny_model: Decoder) -> Callable[[list[int]], torch.Tensor]:
    """``naive_logits(tokens)``: [len(tokens), vocab] from one pass over everything, without any reuse."""

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
    """``naive_greedy(prompt, n)``: the n likeliest tokens, everything computed afresh for each."""

    def generate(prompt: list[int], count: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(naive_logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]

    return generate


@pytest.fixture
def make_engine(tiny_model: Decoder, byte_tokenizer: Tokenizer) -> Callable[..., DynamicInferenceEngine]:
    """``make_engine(blocks=64, **settings)``: an engine over the tiny model with a pool of so many blocks."""

    def make(blocks: int = 64, **settings: object) -> DynamicInferenceEngine:
        block_bytes = KVCache.block_bytes(tiny_model.config, BLOCK, torch.float32)
        config = InferenceConfig(
            **{"block_size_tokens": BLOCK, "kv_cache_memory_bytes": blocks * block_bytes, **settings}
        )
        return DynamicInferenceEngine.build(tiny_model, byte_tokenizer, config)

    return make
