"""Batches over a cache in fp8, and a reference of attention that rounds keys and values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from gpu_support.paged import PagedCase
from torch import Tensor

from megatron_runtime.model.kernels.torch_attention import TorchAttention
from megatron_runtime.model.kv_cache import FLOAT8
from megatron_runtime.model.rotary import rotate


def in_float8(case: PagedCase) -> PagedCase:
    """With a cache of bits; NaN stays NaN."""
    keys, values = (array.to(FLOAT8).view(torch.uint8) for array in case.cache)
    return replace(case, cache=(keys, values))


def widened(case: PagedCase) -> PagedCase:
    """With the numbers of these bits."""
    keys, values = (array.view(FLOAT8).double() for array in case.cache)
    return replace(case, cache=(keys, values))


class RoundedAttention(TorchAttention):
    """The reference on the CPU: keys and values are rounded before they are stored."""

    def attend(self, heads: Tensor, rotation: Any, cache: Any, *others: Any, **options: Any) -> Tensor:
        """As in AttentionPlan."""
        count = cache[0].shape[1]
        queries, keys, values = heads.split((heads.shape[1] - 2 * count, count, count), 1)
        queries, keys = (each if rotation is None else rotate(each, *rotation) for each in (queries, keys))
        keys, values = (each.to(FLOAT8).to(each.dtype) for each in (keys, values))
        return super().attend(torch.cat((queries, keys, values), 1), None, cache, *others, **options)
