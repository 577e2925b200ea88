"""GGUF files of random weights: models of any size without a download."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from numpy.typing import NDArray

_HEAD_DIM, _QUERIES_OF_KEY = 64, 4
_LARGEST_BYTE = 0x3B
"""Larger ones could be those of a scale that is not finite."""


def random_rows(kind: str, rows: int, columns: int) -> NDArray[np.uint8]:
    """A matrix of random blocks of a ggml type, uint8 [rows, bytes of a row]."""
    elements, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    return np.random.default_rng(0).integers(0, _LARGEST_BYTE + 1, (rows, columns // elements * size), dtype=np.uint8)


def write_random_gguf(path: Path, kind: str, *, width: int, layers: int) -> None:
    """A Llama without a tokenizer, whose matrices have blocks of ``kind``: 1.04 billion weights with 16
    layers that are 2048 wide.

    Args:
        path: Of the file.
        kind: The name of ggml's type.
        width: The hidden size, a multiple of 256.
        layers: Their number.
    """
    writer = GGUFWriter(path, "llama")
    heads = width // _HEAD_DIM
    writer.add_block_count(layers)
    writer.add_context_length(2048)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(4 * width)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads // _QUERIES_OF_KEY)
    writer.add_layer_norm_rms_eps(1e-5)

    def add(name: str, rows: int, columns: int) -> None:
        writer.add_tensor(f"{name}.weight", random_rows(kind, rows, columns), raw_dtype=GGMLQuantizationType[kind])

    add("token_embd", 16 * width, width)
    for layer in (f"blk.{number}" for number in range(layers)):
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"{layer}.{norm}.weight", np.ones(width, np.float32))
        for part, height in (("q", width), ("k", width // _QUERIES_OF_KEY), ("v", width // _QUERIES_OF_KEY)):
            add(f"{layer}.attn_{part}", height, width)
        add(f"{layer}.attn_output", width, width)
        add(f"{layer}.ffn_gate", 4 * width, width)
        add(f"{layer}.ffn_up", 4 * width, width)
        add(f"{layer}.ffn_down", width, 4 * width)
    writer.add_tensor("output_norm.weight", np.ones(width, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
