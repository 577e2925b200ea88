"""Kernels for GPUs are compiled while the weights load."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from runtime_support.tiny_checkpoint import write_tiny_checkpoint

from megatron_runtime.model import checkpoint
from megatron_runtime.model.decoder import Decoder


def test_a_thread_compiles_the_kernels_while_the_weights_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block_sizes: list[int | None] = []
    is_compiling, is_loaded = threading.Event(), threading.Event()
    prepare, fill = Decoder.prepare_kernels, checkpoint.fill

    def compile_slowly(decoder: Decoder, block_size_tokens: int | None = None, kv_cache_dtype: str = "auto") -> None:
        block_sizes.append(block_size_tokens)
        is_compiling.set()
        assert is_loaded.wait(60), "the weights wait for the kernels"
        prepare(decoder, block_size_tokens, kv_cache_dtype)

    def fill_meanwhile(*arguments: object, **options: object) -> None:
        assert is_compiling.wait(60), "the kernels wait for the weights"
        fill(*arguments, **options)  # type: ignore[arg-type]
        is_loaded.set()

    monkeypatch.setattr(Decoder, "prepare_kernels", compile_slowly)
    monkeypatch.setattr(checkpoint, "fill", fill_meanwhile)
    checkpoint.load_model(write_tiny_checkpoint(tmp_path), dtype="float32", block_size_tokens=48)
    assert block_sizes[0] == 48
