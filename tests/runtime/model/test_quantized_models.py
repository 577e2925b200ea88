"""Models whose matrices stay quantized, of all kinds of tensors, on one rank and on several."""

from __future__ import annotations

import itertools
import logging
import math
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from runtime_support import model_scenarios
from runtime_support.paged_requests import PagedRequests
from runtime_support.random_blocks import random_blocks
from runtime_support.rank_processes import run_ranks
from suite_support.worker import free_port

from megatron_runtime.errors import CheckpointError, ConfigurationError
from megatron_runtime.model.checkpoint import inspect_checkpoint, load_model, load_tokenizer
from megatron_runtime.model.decoder import Decoder
from megatron_runtime.model.formats.gguf_checkpoint import GgufWeights
from megatron_runtime.model.formats.quantized_weights import KeptKind, kept_kind
from megatron_runtime.model.quantized.kept_tensors import kept_weights
from megatron_runtime.model.quantized.linear import QuantizedLinear
from megatron_runtime.model.refit import offload_weights, restore_weights, update_weights
from megatron_runtime.model.shard import Shard
from megatron_runtime.parallel.layout import ParallelSizes, RankPosition

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 64,
}
EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("Q4_0", "Llama", {"tie_word_embeddings": False}),
    "tied": ("Q6_K", "Llama", {"tie_word_embeddings": True}),
    "biases": ("Q8_0", "Qwen2", {}),
    "norms of heads": ("Q5_K", "Qwen3", {}),
    "experts": ("Q4_K", "Qwen3Moe", EXPERTS),
    "mixtral": ("Q4_1", "Mixtral", {"num_local_experts": 3, "num_experts_per_tok": 2}),
    "gemma": ("Q5_1", "Gemma3", {"sliding_window": 6, "query_pre_attn_scalar": 64}),
}
TOKENS = list(range(1, 20))
CPU = torch.device("cpu")


@pytest.fixture
def save(tmp_path: Path, random_model: Any, write_gguf: Any) -> Any:
    """``save(kind, family, ...)``: a small random GGUF file of one type."""

    def write(kind: str, family: str, **changes: Any) -> Path:
        draw = partial(random_blocks, GGMLQuantizationType[kind])
        model = random_model(family, std=0.05, **(SIZES | changes))
        path: Path = write_gguf(tmp_path / f"{kind}.gguf", model, kind=GGMLQuantizationType[kind], draw=draw)
        return path

    return write


def keep(path: Path, dtype: str = "float32") -> Decoder:
    return load_model(path, dtype=dtype, quantized_weights="keep")


@torch.inference_mode()
def logits(decoder: Decoder, *chunks: list[int]) -> torch.Tensor:
    requests = PagedRequests(decoder, num_blocks=16)
    return torch.cat([requests.forward({"it": chunk})["it"] for chunk in chunks])


@pytest.mark.parametrize("name", MODELS)
def test_a_model_stays_quantized_and_has_nearly_the_logits_of_its_weights(name: str, save: Any) -> None:
    kind, family, changes = MODELS[name]
    path = save(kind, family, **changes)
    kept, expanded = keep(path), load_model(path, dtype="float32", quantized_weights="expand")
    assert all(parameter.dim() == 1 or "router" in owner for owner, parameter in kept.named_parameters())
    expected = expanded.destinations()
    for tensor, weights in kept.destinations().items():
        torch.testing.assert_close(weights, expected[tensor], atol=2e-4 if kind.endswith("_K") else 0.0, rtol=0.0)
    made, exact = logits(kept, TOKENS), logits(expanded, TOKENS)
    assert not torch.equal(made, exact)
    errors = (made - exact).norm(dim=-1) / exact.norm(dim=-1)
    # Where two experts are nearly equal, the rounding may choose the other one.
    assert (errors < 0.03).float().mean() > (0.8 if "experts" in str(changes) else 0.999)


@pytest.mark.parametrize("name", ["llama", "tied", "experts"])
@pytest.mark.parametrize("tensor", [1, 2])
def test_the_plan_of_the_memory_has_the_bytes_in_memory(name: str, tensor: int, save: Any) -> None:
    kind, family, changes = MODELS[name]
    path = save(kind, family, **changes)
    source, shard = (
        inspect_checkpoint(path).source,
        Shard(load_model(path).config, RankPosition(sizes=ParallelSizes(tensor))),
    )
    kept, decoder = kept_weights(shard, source, KeptKind.INTEGERS), keep(path)
    tables = [decoder.embedding.quantized, *decoder.head._packed.matrices]
    linears = [module for module in decoder.layers.modules() if isinstance(module, QuantizedLinear)]
    matrices = {matrix: None for linear in linears for matrix in linear.matrices} | dict.fromkeys(tables)
    assert kept.num_bytes == sum(matrix.num_bytes for matrix in matrices)
    assert kept.parameters == sum(matrix.rows * matrix.columns for matrix in matrices)
    assert (kept.expert_parameters > 0) == (name == "experts")


def test_a_tied_table_is_stored_once(save: Any) -> None:
    decoder = keep(save("Q4_0", "Llama", tie_word_embeddings=True))
    assert decoder.embedding.quantized is decoder.head._packed.matrices[0]


def test_threads_read_codes_together(save: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save("Q4_0", "Llama")
    expected = keep(path)
    meeting, read, calls = threading.Barrier(2, timeout=60), GgufWeights.read_coded, itertools.count()

    def read_together(*arguments: Any) -> Any:
        if next(calls) < 2:
            meeting.wait()
        return read(*arguments)

    monkeypatch.setattr(GgufWeights, "read_coded", read_together)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert torch.equal(logits(keep(path), TOKENS), logits(expected, TOKENS))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_depend_neither_on_chunks_nor_on_other_requests(dtype: str, save: Any) -> None:
    decoder = keep(save("Q4_1", "Llama"), dtype)
    whole = logits(decoder, TOKENS)
    assert torch.equal(logits(decoder, TOKENS[:7], TOKENS[7:8], TOKENS[8:]), whole)
    assert torch.equal(logits(decoder, *([token] for token in TOKENS)), whole)
    with torch.inference_mode():
        crowd = {str(number): TOKENS[: number + 1] for number in range(10)} | {"it": TOKENS}
        assert torch.equal(PagedRequests(decoder, num_blocks=64).forward(crowd)["it"], whole)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_repeated_passes_have_the_bits_of_the_layers(dtype: str, save: Any) -> None:
    decoder = keep(save("Q4_1", "Llama"), dtype)
    passes = [TOKENS[:3], [4], TOKENS[:3], [5], TOKENS[:3], [6], [7]]
    repeated, recorded = logits(decoder, *passes), decoder.recorded_layers
    assert recorded is not None
    assert recorded.num_repeated == 3
    decoder.recorded_layers = None
    assert torch.equal(repeated, logits(decoder, *passes))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
def test_ranks_divide_quantized_matrices(kind: str, save: Any) -> None:
    path, sizes = save(kind, "Llama", tie_word_embeddings=True, intermediate_size=512), ParallelSizes(tensor=2)
    whole = keep(path).destinations()
    first, second = run_ranks(model_scenarios.answer_quantized, 2, sizes, free_port(), path)
    assert {said["quantized"] for said in (first, second)} == {"QuantizedLinear"}
    for name, weights in whole.items():
        dim = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
        parts = [said["weights"][name] for said in (first, second)]
        assert torch.equal(parts[0] if weights.dim() == 1 else torch.cat(parts, dim), weights), name
    alone = logits(keep(path), model_scenarios.PROMPTS["long"])
    together = torch.cat(first["whole"])[: len(alone)]
    assert float((together - alone).norm() / alone.norm()) < 0.01
    assert torch.equal(torch.cat(first["one by one"]), torch.cat(first["whole"]))
    assert torch.equal(first["answers"].logits, first["brought back"].logits)
    assert first["answers"].tokens == first["brought back"].tokens == second["answers"].tokens


def test_columns_that_ranks_divide_within_a_block_are_expanded(save: Any) -> None:
    path = save("Q8_0", "Llama", intermediate_size=96)
    said = run_ranks(model_scenarios.answer_quantized, 2, ParallelSizes(tensor=2), free_port(), path)
    assert {each["quantized"] for each in said} <= {"PackedLinear", "VectorLinear"}
    alone, together = logits(keep(path), model_scenarios.PROMPTS["short"]), said[0]["whole"][1]
    assert float((together - alone).norm() / alone.norm()) < 0.03


def test_other_types_are_expanded_and_logged(save: Any, caplog: pytest.LogCaptureFixture) -> None:
    path = save("IQ4_NL", "Llama")
    with caplog.at_level(logging.INFO):
        decoder = keep(path)
    assert "matrices that stay quantized: none; expanded: 16 IQ4_NL" in caplog.text
    assert torch.equal(logits(decoder, TOKENS), logits(load_model(path, dtype="float32"), TOKENS))


def test_released_and_renewed_weights_stay_quantized(save: Any) -> None:
    path, other = save("Q4_0", "Llama"), save("Q8_0", "Llama")
    decoder, expected = keep(path), {kind: logits(keep(kind), TOKENS) for kind in (path, other)}
    offload_weights(decoder)
    restore_weights(decoder, CPU)
    assert torch.equal(logits(decoder, TOKENS), expected[path])
    update_weights(decoder, other)
    assert isinstance(decoder.layers[0].feed_forward.down, QuantizedLinear)
    assert torch.equal(logits(decoder, TOKENS), expected[other])
    named = {name: weights.clone() for name, weights in decoder.destinations().items()}
    update_weights(decoder, named)
    assert not any(isinstance(module, QuantizedLinear) for module in decoder.modules())
    update_weights(decoder, path)
    assert torch.equal(logits(decoder, TOKENS), expected[path])


def test_scales_that_are_not_finite_are_reported(save: Any) -> None:
    path = save("Q8_0", "Llama")
    from megatron_runtime.model.formats.gguf_file import GgufFile

    tensor = GgufFile(path).tensors["blk.1.ffn_down.weight"]
    with path.open("r+b") as file:
        file.seek(tensor.offset)
        file.write(b"\xff\x7f")  # NaN as float16
    wrong = r"1 of the 2,048 numbers in tensor model\.layers\.1\.mlp\.down_proj\.weight are NaN or infinite as float16"
    with pytest.raises(CheckpointError, match=wrong):
        load_model(path, dtype="float32", quantized_weights="keep", check_finite=True)


@pytest.mark.parametrize(
    ("name", "dtype", "device", "kept"),
    [
        ("keep", "auto", "cpu", KeptKind.INTEGERS),
        ("keep", "bfloat16", "cpu", KeptKind.INTEGERS),
        ("keep", "float32", "cpu", KeptKind.INTEGERS),
        ("keep", "float16", "cuda", KeptKind.FLOAT8),
        ("expand", "auto", "cuda", KeptKind.NONE),
        ("expand", "auto", "cpu", KeptKind.NONE),
    ],
)
def test_the_choice_depends_on_dtype_and_device(name: str, dtype: str, device: str, kept: KeptKind) -> None:
    assert kept_kind(name, dtype, device) is kept


def test_what_has_no_kernels_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="a CPU computes with quantized weights in bfloat16 or float32"):
        kept_kind("keep", "float16", "cpu")
    with pytest.raises(ConfigurationError, match="quantized_weights int4: use one of expand, keep"):
        kept_kind("int4", "auto", "cuda")


@pytest.mark.model
def test_perplexity_is_nearly_that_of_the_expanded_weights(smollm2_path: Path) -> None:
    """benchmarks/README.md has the mean over many texts. That of one text varies by several tenths of a percent."""
    text = (Path(__file__).parents[3] / "LICENSE").read_text(encoding="utf-8")
    tokens = load_tokenizer(smollm2_path).tokenize(text)[:512]
    kept, expanded = (
        _loss(load_model(smollm2_path, dtype="float32", quantized_weights=choice), tokens)
        for choice in ("keep", "expand")
    )
    assert kept != expanded
    assert abs(math.exp(kept - expanded) - 1) < 0.01


@torch.inference_mode()
def _loss(decoder: Decoder, tokens: list[int]) -> float:
    """The mean negative log probability of a token after those before it."""
    made = PagedRequests(decoder).forward({"it": tokens})["it"][:-1].log_softmax(-1)
    return -float(made.gather(1, torch.tensor(tokens[1:])[:, None]).mean())
