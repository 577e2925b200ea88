"""Live models of Megatron Core, whose weights a decoder shares."""

from __future__ import annotations

from megatron_runtime.model.megatron.live_model import from_megatron, readable_tokenizer
from megatron_runtime.model.megatron.live_refit import from_live_model
from megatron_runtime.model.megatron.sharing import is_megatron_model, is_megatron_state, share_model

__all__ = [
    "from_live_model",
    "from_megatron",
    "is_megatron_model",
    "is_megatron_state",
    "readable_tokenizer",
    "share_model",
]
