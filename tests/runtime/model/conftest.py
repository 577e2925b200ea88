"""Small random models, and requests for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_support.gguf_writing import write_gguf_file
from runtime_support.paged_requests import PagedRequests
from runtime_support.reference_models import SIZES, new_model, selection_biases

BLOCK_SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}


@pytest.fixture(scope="session")
def paged_requests() -> type[PagedRequests]:
    """``paged_requests(decoder)``: an empty cache for the decoder, and methods to run requests."""
    return PagedRequests


@pytest.fixture(scope="session")
def random_model() -> Callable[..., Any]:
    """``random_model(family, ...)``: a small model of transformers with random weights, of the sizes given or SIZES."""
    return _random_model


@pytest.fixture(scope="session")
def model_of_blocks() -> Callable[..., Any]:
    """The same, of sizes that GGUF's blocks of 32 divide."""
    return partial(_random_model, std=0.1, **BLOCK_SIZES)


@pytest.fixture(scope="session")
def save_model() -> Callable[..., Any]:
    """``save_model(folder, family, ...)``: the same, saved in ``folder``."""

    def save(folder: Path, family: str, **settings: Any) -> Any:
        model = _random_model(family, **settings)
        model.save_pretrained(folder)
        return model

    return save


def _random_model(family: str = "Llama", *, kind: str = "ForCausalLM", std: float = 0.2, **settings: Any) -> Any:
    model = new_model(family, kind=kind, **(SIZES | settings))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=std)
    for bias in selection_biases(model):
        torch.nn.init.normal_(bias, std=std)
    return model


@pytest.fixture(scope="session")
def write_gguf() -> Callable[..., Path]:
    """``write_gguf(path, model, ...)``: a transformers model as llama.cpp's converter would write it."""
    return write_gguf_file
