"""Recurrent layers without weights: their configuration, and the plans, inputs and states of requests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_runtime.model.config import ModelConfig
from megatron_runtime.model.forward_batch import ForwardBatch
from megatron_runtime.model.recurrence import RecurrentPlan

LENGTHS = (1, 7, 2, 30)
CLOSE = {"atol": 1e-5, "rtol": 1e-5}


def plan_of(lengths: tuple[int, ...], contexts: tuple[int, ...] | None = None) -> RecurrentPlan:
    """Requests of these lengths, whose slots are in descending order; with older tokens up to ``contexts``."""
    unused = torch.zeros(0, dtype=torch.int64)
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    slots = torch.arange(len(lengths), 0, -1)
    known = torch.tensor(contexts or lengths, dtype=torch.int32)
    return RecurrentPlan(ForwardBatch(*[unused] * 3, starts, known, unused, unused, state_slots=slots))


def random(*shape: int) -> Tensor:
    """Normal numbers, the same for the same shape."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def garbage(*shape: int) -> Tensor:
    """States of earlier requests, which new ones must not read."""
    return torch.full((len(LENGTHS) + 1, *shape), torch.nan)


def mixed_config(**fields: Any) -> ModelConfig:
    """A small model; ``fields`` say how many layers it has, and which are recurrent."""
    return ModelConfig(
        architecture="mixed",
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_attention_heads=2,
        num_kv_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        **fields,
    )
