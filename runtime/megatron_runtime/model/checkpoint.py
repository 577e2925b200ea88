"""Loads and inspects checkpoints."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_runtime.cpu_features import has_bfloat16
from megatron_runtime.errors import ConfigurationError
from megatron_runtime.model.config import ModelConfig
from megatron_runtime.model.decoder import Decoder
from megatron_runtime.model.float8_loading import float8_decoder, keep_float8
from megatron_runtime.model.formats.checkpoint_header import (
    CheckpointSummary,
    check_fit,
    inspect_checkpoint,
    open_checkpoint,
)
from megatron_runtime.model.formats.checkpoint_path import checkpoint_path
from megatron_runtime.model.formats.origin import Origin
from megatron_runtime.model.formats.quantized_weights import QUANTIZED_WEIGHTS, KeptKind, kept_kind
from megatron_runtime.model.formats.source import resolve_source
from megatron_runtime.model.formats.weight_source import WeightSource
from megatron_runtime.model.kernels.flashinfer_backend import choose_backend
from megatron_runtime.model.quantized_loading import keep_quantized
from megatron_runtime.model.tokenizer import load_tokenizer
from megatron_runtime.model.weights import Placements, ProgressCallback, load_weights
from megatron_runtime.parallel.ranks import Ranks
from megatron_runtime.processes.allocator import return_freed_memory

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Values of ``dtype`` besides ``auto``."""

__all__ = [
    "DTYPES",
    "QUANTIZED_WEIGHTS",
    "CheckpointSummary",
    "check_fit",
    "checkpoint_path",
    "choose_dtype",
    "fill",
    "inspect_checkpoint",
    "load_model",
    "load_tokenizer",
    "open_checkpoint",
    "resolve_source",
]


def choose_dtype(name: str, device: torch.device | str) -> torch.dtype:
    """The dtype of weights, activations and cache for ``name`` on ``device``.

    ``auto`` is bfloat16, or float32 on a CPU without instructions for it. Raises ConfigurationError with the known
    names.
    """
    if name == "auto":
        return torch.bfloat16 if torch.device(device).type != "cpu" or has_bfloat16() else torch.float32
    if name not in DTYPES:
        raise ConfigurationError(f"dtype is {name!r}, expected one of auto, {', '.join(DTYPES)}", field="dtype")
    return DTYPES[name]


def load_model(
    path: Path | str,
    *,
    dtype: str = "auto",
    device: torch.device | str = "cpu",
    max_sequence_length: int | None = None,
    check_finite: bool = False,
    on_progress: ProgressCallback | None = None,
    ranks: Ranks | None = None,
    block_size_tokens: int | None = None,
    quantized_weights: str = "expand",
    kv_cache_dtype: str = "auto",
    attention_backend: str = "auto",
) -> Decoder:
    """The decoder in a GGUF file or a folder, with weights as ``dtype`` on ``device``.

    A folder contains a Hugging Face ``config.json`` with safetensors or a Megatron ``torch_dist`` checkpoint, or the
    output of a Megatron training, of which the latest iteration is loaded. ``max_sequence_length`` replaces the
    configuration's ``max_position_embeddings``. Memory beyond the weights is small. With ``ranks``, only this rank's
    part is read. While the weights load, kernels for GPUs are compiled for a KV cache with blocks of
    ``block_size_tokens`` and the type ``kv_cache_dtype``; None: at their first use. ``quantized_weights`` is one of
    `QUANTIZED_WEIGHTS`; ``attention_backend`` one of `ATTENTION_BACKENDS`.

    Raises:
        CheckpointError: As in `inspect_checkpoint`; with ``check_finite`` also for a tensor with NaN or infinity.
        ConfigurationError: ``max_sequence_length`` exceeds that of the model, or the model can't be divided among
            ``ranks``, or ``dtype``, ``quantized_weights``, ``kv_cache_dtype`` or ``attention_backend`` is unknown or
            not possible.
    """
    path = checkpoint_path(path)
    origin = Origin.of(path)
    config, source, rotary_factors = open_checkpoint(path)
    check_fit(config, source)
    if max_sequence_length is not None:
        config = _limit_length(config, max_sequence_length)
    kept, chosen = kept_kind(quantized_weights, dtype, torch.device(device).type), choose_dtype(dtype, device)
    if kept is KeptKind.FLOAT8:
        decoder = float8_decoder(config, source, chosen, device, ranks)
    else:
        decoder = Decoder(config, dtype=chosen, device=device, ranks=ranks)
    decoder.kept_kind = kept
    decoder.flashinfer = choose_backend(attention_backend, config, chosen, decoder.device, kv_cache_dtype)
    with ThreadPoolExecutor(1, "kernels") as aside:
        kernels = aside.submit(decoder.prepare_kernels, block_size_tokens, kv_cache_dtype)
        fill(decoder, source, rotary_factors, on_progress, check_finite=check_finite)
        kernels.result()
    decoder.origin = origin
    decoder.prepare()
    return decoder.eval()


def fill(
    decoder: Decoder,
    source: WeightSource,
    rotary_factors: NDArray[np.float32] | None,
    on_progress: ProgressCallback | None = None,
    *,
    check_finite: bool,
) -> None:
    """Copy the weights of a source that passed `check_fit` into a decoder that isn't packed."""
    placements: Placements
    if decoder.kept_kind is KeptKind.INTEGERS:
        placements = keep_quantized(decoder, source)
    elif decoder.kept_kind is KeptKind.FLOAT8:
        placements = keep_float8(decoder, source)
    else:
        placements = decoder.placements()
    load_weights(source, placements, on_progress, check_finite=check_finite)
    if rotary_factors is not None:
        decoder.positions.frequencies /= torch.from_numpy(rotary_factors).to(decoder.device)
    # Otherwise the buffers of reading would remain while each matrix exists twice, which is packed next.
    return_freed_memory()


def _limit_length(config: ModelConfig, max_sequence_length: int) -> ModelConfig:
    if not 1 <= max_sequence_length <= config.max_position_embeddings:
        raise ConfigurationError(
            f"max_sequence_length is {max_sequence_length}, expected 1 to {config.max_position_embeddings}, "
            "the maximum length of the model",
            field="max_sequence_length",
        )
    return replace(config, max_position_embeddings=max_sequence_length)
