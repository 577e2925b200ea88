"""Models with random weights of the measured sizes."""

from __future__ import annotations

from typing import Any

import torch

from gpu_checks.results import DEVICE, Sizes
from megatron_runtime.model.config import ModelConfig
from megatron_runtime.model.decoder import Decoder
from megatron_runtime.parallel.ranks import Ranks


def random_model(
    sizes: Sizes, *, device: str | torch.device = DEVICE, ranks: Ranks | None = None, **changes: Any
) -> Decoder:
    """Of these sizes, with changes of the configuration; with ``ranks``, the part of this rank."""
    model = Decoder(ModelConfig(**(sizes.model | changes)), dtype=sizes.dtype, device=device, ranks=ranks)
    for weight in model.parameters():
        weight.data.fill_(1.0) if weight.dim() == 1 else weight.data.normal_(std=0.02)
    return model


def bytes_read(model: Decoder) -> int:
    """By a pass: the weights without the embedding, of which it reads few rows."""
    return sum(each.nbytes for name, each in model.named_parameters() if "embed" not in name)


def weight_bytes(model: Decoder) -> int:
    """Of all weights."""
    return sum(each.nbytes for each in model.parameters())
