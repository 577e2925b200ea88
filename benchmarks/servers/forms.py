"""Converts a Llama in GGUF to a Hugging Face checkpoint folder, for servers without GGUF support."""

from __future__ import annotations

import json
from pathlib import Path


def write_folder(gguf: Path, folder: Path) -> None:
    """Writes the same weights, rounded to bfloat16, and the same tokenizer, without a chat template."""
    import torch
    from safetensors.torch import save_file

    from megatron_runtime.model.checkpoint import load_tokenizer
    from megatron_runtime.model.decoder import Decoder
    from megatron_runtime.model.formats.checkpoint_header import open_checkpoint
    from megatron_runtime.model.weights import load_weights

    config, source, _ = open_checkpoint(gguf)
    decoder = Decoder(config, dtype=torch.bfloat16)
    load_weights(source, decoder.placements())
    folder.mkdir()
    tensors = {name: view.contiguous() for name, view in decoder.destinations().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer = load_tokenizer(gguf)
    (folder / "tokenizer.json").write_text(tokenizer.definition)
    end = tokenizer.detokenize([tokenizer.eod], skip_special_tokens=False)
    words = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
    (folder / "tokenizer_config.json").write_text(json.dumps(words))
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "hidden_act": "silu",
        "tie_word_embeddings": config.tie_word_embeddings,
        "eos_token_id": tokenizer.eod,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(fields))
