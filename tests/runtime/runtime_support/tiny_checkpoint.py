"""A small real checkpoint that loads at once: a random Llama of two layers, and a tokenizer of bytes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from runtime_support.byte_backend import END, END_TEXT, byte_backend
from transformers import LlamaConfig, LlamaForCausalLM


def write_tiny_checkpoint(
    folder: Path, *, longest: int = 512, marks: Sequence[str] = (), chat_template: str | None = None
) -> Path:
    """Weights so wide apart that the likeliest token is never in doubt, in Hugging Face's form.

    ``marks`` are special tokens beside the one that ends an answer.
    """
    config = LlamaConfig(
        vocab_size=END + 1 + len(marks),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=longest,
        bos_token_id=None,
        eos_token_id=END,
    )
    torch.manual_seed(3)
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.4)
    model.save_pretrained(folder)
    byte_backend(marks).save(str(folder / "tokenizer.json"))
    template = {} if chat_template is None else {"chat_template": chat_template}
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END_TEXT, **template}))
    return folder
