"""Every quantization of the gguf package gives the logits of the dequantized weights, in every kind of tensor."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType
from runtime_support.random_blocks import random_blocks
from runtime_support.reference_models import CLOSE, logits_of

from megatron_runtime.model.checkpoint import load_model
from megatron_runtime.model.formats.gguf_file import GgufFile

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 64,
}
"""All rows consist of whole blocks of 256, the largest."""
GEMMA = {"sliding_window": 6, "query_pre_attn_scalar": 64}
KIN: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "mixtral": ("Mixtral", {"num_local_experts": 3, "num_experts_per_tok": 2}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "qwen3 moe": (
        "Qwen3Moe",
        {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True},
    ),
    "gemma2": ("Gemma2", GEMMA | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3", GEMMA),
}
KINDS = sorted({GGMLQuantizationType.F32, GGMLQuantizationType.F16, *gguf.quants._type_traits})
TOKENS = list(range(1, 20))


@torch.inference_mode()
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("kin", KIN)
def test_a_quantized_model_has_the_logits_of_its_dequantized_weights(
    kin: str,
    kind: GGMLQuantizationType,
    tmp_path: Path,
    random_model: Any,
    write_gguf: Any,
    paged_requests: Any,
) -> None:
    family, changes = KIN[kin]
    model = random_model(family, std=0.05, **(SIZES | changes))
    before = model.model.layers[0].self_attn.q_proj.weight.clone()
    path = write_gguf(tmp_path / "model.gguf", model, kind=kind, draw=partial(random_blocks, kind))
    assert not torch.equal(model.model.layers[0].self_attn.q_proj.weight, before)
    expected = logits_of(model, TOKENS)
    assert expected.std() > 0.01
    decoder = load_model(path, dtype="float32")
    torch.testing.assert_close(paged_requests(decoder, num_blocks=8).forward({"it": TOKENS})["it"], expected, **CLOSE)
    assert {tensor.kind for tensor in GgufFile(path).tensors.values()} == {kind, GGMLQuantizationType.F32}
