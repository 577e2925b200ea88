"""Products whose results are parts of a sum over ranks, written to memory that the ranks give."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_runtime.model.config import ModelConfig
from megatron_runtime.model.decoder import Decoder
from megatron_runtime.model.layers import Linear
from megatron_runtime.parallel.single_rank import SingleRank

CONFIG: dict[str, Any] = {
    "architecture": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_layers": 1,
    "num_attention_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
}


class GivenMemory:
    """Gives memory of up to 8 rows, and keeps it."""

    def __init__(self) -> None:
        self.given: list[Tensor] = []

    def memory_for_part(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        if shape[0] > 8:
            return None
        self.given.append(torch.full(tuple(shape), torch.nan, dtype=dtype))
        return self.given[-1]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 8, 9])
@torch.inference_mode()
def test_a_product_in_given_memory_has_the_usual_bits(rows: int, dtype: torch.dtype, *, bias: bool) -> None:
    linear, memory = Linear(48, 16, bias=bias, dtype=dtype), GivenMemory()
    for weight in linear.parameters():
        weight.normal_()
    inputs = torch.randn(rows, 48, dtype=dtype)
    expected = linear(inputs)
    linear.memory_for_part = memory.memory_for_part
    found = linear(inputs)
    assert torch.equal(found, expected)
    assert [found.data_ptr()] == [each.data_ptr() for each in memory.given] or rows > 8
    linear.rows_together = 4
    assert linear(inputs).shape == expected.shape
    assert len(memory.given) == (rows <= 8)


@pytest.mark.parametrize("parallel", [False, True])
def test_parts_that_are_needed_together_have_memory_of_their_own(parallel: bool) -> None:
    layer: Any = Decoder(
        ModelConfig(**CONFIG, parallel_feed_forward=parallel), dtype=torch.float32, ranks=SingleRank()
    ).layers[0]
    narrow = SimpleNamespace(attention=layer.attention.output, network=layer.feed_forward.down)
    assert (narrow.attention.memory_for_part is None, narrow.network.memory_for_part is None) == (parallel, parallel)
