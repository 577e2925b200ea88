"""Small random checkpoints of every family, written by transformers, have the logits of transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_support.family_models import FAMILIES, SIZES
from runtime_support.reference_models import (
    CLOSE,
    assert_most_likely,
    logits_of,
    new_model,
    selection_biases,
)
from suite_support.repetition import repeated

from megatron_runtime.model.checkpoint import inspect_checkpoint, load_model
from megatron_runtime.model.decoder import Decoder
from megatron_runtime.model.formats.expected_tensors import expected_tensors

STEPS = repeated(24, 64)


def write_checkpoint(folder: Path, family: str, settings: dict[str, Any], **save_options: Any) -> Any:
    """Save a random model of ``family``; return it in float32, with the values of the checkpoint.

    Norms and biases are random too, since ones and zeros would hide mistakes.
    """
    model = new_model(family, **(SIZES | settings))
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name or ".ln_" in name:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.3)
        else:
            torch.nn.init.normal_(parameter, std=0.1)
    for bias in selection_biases(model):
        torch.nn.init.normal_(bias, std=0.3)
    if dtype := save_options.pop("dtype", None):
        model.to(dtype)
    model.save_pretrained(folder, **save_options)
    return model if dtype is None else type(model).from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """A checkpoint of a model in FAMILIES, and the model."""

    @cache
    def write(name: str) -> tuple[Path, Any]:
        folder = tmp_path_factory.mktemp("family")
        return folder, write_checkpoint(folder, *FAMILIES[name])

    return write


def assert_same_logits(decoder: Decoder, model: Any, paged_requests: Any) -> None:
    """In one prefill, then in chunks beside single steps."""
    tokens = torch.randint(0, SIZES["vocab_size"], (40,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = logits_of(model, tokens)
    whole = paged_requests(decoder, num_blocks=32, block_size_tokens=4).forward({"it": tokens})["it"]
    torch.testing.assert_close(whole, expected, **CLOSE)
    requests = paged_requests(decoder, num_blocks=32, block_size_tokens=4)
    cuts = [0, 9, 10, 11, 12, 30, 31, 40]
    parts = [requests.forward({"it": tokens[a:b]})["it"] for a, b in pairwise(cuts)]
    torch.testing.assert_close(torch.cat(parts), expected, **CLOSE)


@torch.inference_mode()
def assert_same_greedy_tokens(decoder: Decoder, model: Any, paged_requests: Any) -> None:
    """For two requests of different length that are served together."""
    prompts = {"long": list(range(1, 31)), "short": [7, 5, 3]}
    ours = paged_requests(decoder).continue_greedily(prompts, STEPS)
    for name, prompt in prompts.items():
        assert_most_likely(model, prompt, ours[name])


@pytest.mark.repetition
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers(
    name: str, checkpoint: Callable[[str], tuple[Path, Any]], paged_requests: Any
) -> None:
    folder, model = checkpoint(name)
    decoder = load_model(folder, dtype="float32")
    assert_same_logits(decoder, model, paged_requests)
    assert_same_greedy_tokens(decoder, model, paged_requests)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_checkpoint_in_half_precision_computes_in_float32_on_request(
    dtype: torch.dtype, tmp_path: Path, paged_requests: Any
) -> None:
    model = write_checkpoint(tmp_path, "Llama", {}, dtype=dtype)
    assert_same_logits(load_model(tmp_path, dtype="float32"), model, paged_requests)


def test_a_checkpoint_in_shards_is_the_same_model(tmp_path: Path, paged_requests: Any) -> None:
    model = write_checkpoint(tmp_path, "Llama", {}, max_shard_size="60KB")
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 1
    assert_same_logits(load_model(tmp_path, dtype="float32"), model, paged_requests)


def test_bfloat16_is_as_close_to_float32_as_that_of_transformers(tmp_path: Path, paged_requests: Any) -> None:
    model = write_checkpoint(tmp_path, "Llama", {}, dtype=torch.bfloat16)
    tokens = list(range(1, 30))
    exact = logits_of(model, tokens)
    rounded = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    allowed = (logits_of(rounded, tokens) - exact).abs().max()
    ours = paged_requests(load_model(tmp_path, dtype="bfloat16")).forward({"it": tokens})["it"]
    assert ours.dtype == torch.float32
    assert (ours - exact).abs().max() <= 2 * allowed


def test_the_summary_counts_what_transformers_counts(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, "Llama", {"tie_word_embeddings": True}, dtype=torch.bfloat16)
    summary = inspect_checkpoint(tmp_path)
    assert summary.num_parameters == model.num_parameters()
    assert summary.weight_bytes == 2 * model.num_parameters()
    assert summary.loaded_bytes(torch.float32) == 4 * model.num_parameters()
    assert summary.config.max_position_embeddings == SIZES["max_position_embeddings"]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_tensors_that_a_header_is_compared_with_are_those_of_the_decoder(
    name: str, checkpoint: Callable[[str], tuple[Path, Any]]
) -> None:
    config = inspect_checkpoint(checkpoint(name)[0]).config
    decoder = Decoder(config, dtype=torch.float32, device="meta")
    shapes = {name: tuple(view.shape) for name, view in decoder.destinations().items()}
    assert list(expected_tensors(config).items()) == list(shapes.items())


def test_logits_are_computed_only_for_requested_rows(tmp_path: Path, paged_requests: Any) -> None:
    write_checkpoint(tmp_path, "Llama", {})
    requests = paged_requests(load_model(tmp_path, dtype="float32"))
    batch = requests._batch({"a": [1, 2, 3], "b": [4]})
    every = requests.decoder(batch, requests.cache)
    last = requests.decoder(replace(batch, logit_rows=torch.tensor([2, 3])), requests.cache)
    torch.testing.assert_close(last, every[2:], **CLOSE)


@pytest.mark.parametrize("name", ["llama", "deepseek v3"])
def test_the_cache_keeps_its_contents_when_it_is_offloaded_and_restored(
    name: str, tmp_path: Path, paged_requests: Any
) -> None:
    model = write_checkpoint(tmp_path, *FAMILIES[name])
    requests = paged_requests(load_model(tmp_path, dtype="float32"))
    requests.forward({"it": [5, 6, 7]})
    requests.cache.offload(range(requests.cache.num_blocks))
    assert not requests.cache.is_resident
    requests.cache.restore()
    torch.testing.assert_close(requests.forward({"it": [8]})["it"], logits_of(model, [5, 6, 7, 8])[-1:], **CLOSE)


def test_a_released_cache_is_empty_after_its_restoration(tmp_path: Path, paged_requests: Any) -> None:
    write_checkpoint(tmp_path, "Llama", {})
    cache = paged_requests(load_model(tmp_path, dtype="float32")).cache
    keys, _ = cache.layer(0)
    keys.fill_(1.0)
    cache.release()
    assert not cache.is_resident
    cache.restore()
    assert not cache.layer(0)[0].any()


def test_the_bytes_of_a_block_are_those_of_the_pool_divided_by_its_blocks(tmp_path: Path, paged_requests: Any) -> None:
    write_checkpoint(tmp_path, "Llama", {})
    cache = paged_requests(load_model(tmp_path, dtype="float32"), num_blocks=8, block_size_tokens=16).cache
    keys, values = cache.layer(0)
    assert keys.shape == values.shape == (8, 2, 16, 8)
    per_block = cache.block_bytes(load_model(tmp_path, dtype="float32").config, 16, torch.float32)
    assert cache.num_bytes == 8 * per_block == 3 * (keys.nbytes + values.nbytes)
