"""Requests of recurrent layers without a model: their plans, inputs and states."""

from __future__ import annotations

import torch
from torch import Tensor

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
