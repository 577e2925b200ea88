"""A paged cache with requests in it, without an engine around it; and a writer of GGUF files."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, get_tensor_name_map
from gguf.quants import quantize
from torch import Tensor

from megatron_runtime.model.decoder import Decoder
from megatron_runtime.model.forward_batch import ForwardBatch
from megatron_runtime.model.kv_cache import KVCache

MODEL_ARCH_BY_NAME: dict[str, MODEL_ARCH] = {name: arch for arch, name in MODEL_ARCH_NAMES.items()}


SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
CLASSES = {"Gemma3Config": "Gemma3TextConfig", "GPT2ForCausalLM": "GPT2LMHeadModel"}


class PagedRequests:
    """Requests by name, whose blocks are drawn from the pool in random order."""

    def __init__(self, decoder: Decoder, *, num_blocks: int = 512, block_size_tokens: int = 16, seed: int = 0) -> None:
        self.decoder = decoder
        self.cache = KVCache(decoder.config, num_blocks, block_size_tokens, decoder.dtype)
        self._free = random.Random(seed).sample(range(num_blocks), num_blocks)
        self._tables: dict[str, list[int]] = {}
        self._lengths: dict[str, int] = {}

    def forward(self, new_tokens: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
        """One pass over the new tokens of each request; the logits of every one of them, [new tokens, vocab]."""
        batch = self._batch(new_tokens)
        logits = self.decoder(batch, self.cache)
        return dict(zip(new_tokens, logits.split([len(tokens) for tokens in new_tokens.values()]), strict=True))

    def continue_greedily(self, prompts: Mapping[str, Sequence[int]], num_tokens: int) -> dict[str, list[int]]:
        """Prefill all prompts in one pass, then decode them together."""
        made: dict[str, list[int]] = {name: [] for name in prompts}
        new = {name: list(tokens) for name, tokens in prompts.items()}
        for _ in range(num_tokens):
            new = {name: [int(rows[-1].argmax())] for name, rows in self.forward(new).items()}
            for name, tokens in new.items():
                made[name] += tokens
        return made

    def _batch(self, new_tokens: Mapping[str, Sequence[int]]) -> ForwardBatch:
        size = self.cache.block_size_tokens
        positions: list[int] = []
        slots: list[int] = []
        starts = [0]
        for name, tokens in new_tokens.items():
            table, old = self._tables.setdefault(name, []), self._lengths.get(name, 0)
            self._lengths[name] = old + len(tokens)
            while len(table) * size < self._lengths[name]:
                table.append(self._free.pop())
            mine = range(old, self._lengths[name])
            positions += mine
            slots += [table[position // size] * size + position % size for position in mine]
            starts.append(starts[-1] + len(tokens))
        tables = [self._tables[name] for name in new_tokens]
        width = max(map(len, tables))
        return ForwardBatch(
            tokens=torch.tensor([token for tokens in new_tokens.values() for token in tokens]),
            positions=torch.tensor(positions),
            slots=torch.tensor(slots),
            query_starts=torch.tensor(starts, dtype=torch.int32),
            context_lengths=torch.tensor([self._lengths[name] for name in new_tokens], dtype=torch.int32),
            block_tables=torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32),
            logit_rows=torch.arange(starts[-1]),
        )


@pytest.fixture(scope="session")
def paged_requests() -> type[PagedRequests]:
    """``paged_requests(decoder)``: an empty cache for it, and a way to run requests through both."""
    return PagedRequests


@pytest.fixture(scope="session")
def random_model() -> Callable[..., Any]:
    """``random_model(family, ...)``: a small model of transformers with random weights, of the sizes given or SIZES."""
    return _random_model


@pytest.fixture(scope="session")
def save_model() -> Callable[..., Any]:
    """``save_model(folder, family, ...)``: the same, saved in ``folder``."""

    def save(folder: Path, family: str, **settings: Any) -> Any:
        model = _random_model(family, **settings)
        model.save_pretrained(folder)
        return model

    return save


def _random_model(family: str = "Llama", *, kind: str = "ForCausalLM", std: float = 0.2, **settings: Any) -> Any:
    torch.manual_seed(0)
    config_class, model_class = (CLASSES.get(family + end, family + end) for end in ("Config", kind))
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**(SIZES | settings))).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=std)
    return model


@pytest.fixture(scope="session")
def write_gguf() -> Callable[..., Path]:
    """``write_gguf(path, model, ...)``: a transformers model as llama.cpp's converter would write it."""
    return _write_gguf


def _write_gguf(
    path: Path,
    model: Any,
    *,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    rope_factors: Tensor | None = None,
    metadata: Callable[[GGUFWriter], None] = lambda _: None,
    leave_out: Sequence[str] = (),
) -> Path:
    config = model.config
    architecture = config.model_type.removesuffix("_text")
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if architecture in ("gemma2", "gemma3"):
        writer.add_sliding_window(config.sliding_window)
        for cap, add in (
            (config.attn_logit_softcapping, writer.add_attn_logit_softcapping),
            (config.final_logit_softcapping, writer.add_final_logit_softcapping),
        ):
            if cap is not None:
                add(cap)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    metadata(writer)
    names = get_tensor_name_map(MODEL_ARCH_BY_NAME[architecture], config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name in leave_out or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        values = tensor.numpy()
        if architecture == "llama" and (match := re.search(r"\.([qk])_proj\.", name)):
            heads = config.num_attention_heads if match[1] == "q" else config.num_key_value_heads
            values = np.ascontiguousarray(
                values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
            )
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None
        this = kind if values.ndim > 1 else GGMLQuantizationType.F32
        writer.add_tensor(stored, quantize(values, this), raw_dtype=this)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
