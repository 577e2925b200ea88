"""Writes a model of transformers in the ``torch_dist`` format of Megatron, with torch.distributed.checkpoint."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as distributed_checkpoint

NORM = {
    "input_layernorm": "self_attention.linear_qkv.layer_norm_",
    "post_attention_layernorm": "mlp.linear_fc1.layer_norm_",
}


def megatron_layer(model: Any, layer: int, *, fused_norms: bool = True) -> dict[str, torch.Tensor]:
    """One layer's tensors in Megatron's names and layout."""
    state = {
        name.removeprefix(f"model.layers.{layer}."): tensor
        for name, tensor in model.state_dict().items()
        if name.startswith(f"model.layers.{layer}.")
    }
    groups = model.config.num_key_value_heads
    found: dict[str, torch.Tensor] = {}
    for kind in ("weight", "bias"):
        pieces = [state.get(f"self_attn.{name}_proj.{kind}") for name in "qkv"]
        if (fused := state.get(f"self_attn.qkv_proj.{kind}")) is not None:
            size = model.config.hidden_size // model.config.num_attention_heads
            pieces = list(fused.split([size * model.config.num_attention_heads, size * groups, size * groups]))
        if pieces[0] is not None:
            grouped = [piece.view(groups, -1, *piece.shape[1:]) for piece in pieces]
            found[f"self_attention.linear_qkv.{kind}"] = torch.cat(grouped, 1).flatten(0, 1)
    found["self_attention.linear_proj.weight"] = state["self_attn.o_proj.weight"]
    mixture = "mlp.gate.weight" in state
    if mixture:
        found["mlp.router.weight"] = state["mlp.gate.weight"]
        found["mlp.experts.experts.linear_fc1.weight"] = state["mlp.experts.gate_up_proj"]
        found["mlp.experts.experts.linear_fc2.weight"] = state["mlp.experts.down_proj"]
    elif "mlp.gate_up_proj.weight" in state:
        found["mlp.linear_fc1.weight"] = state["mlp.gate_up_proj.weight"]
    else:
        found["mlp.linear_fc1.weight"] = torch.cat((state["mlp.gate_proj.weight"], state["mlp.up_proj.weight"]))
    if not mixture:
        found["mlp.linear_fc2.weight"] = state["mlp.down_proj.weight"]
    for name, fused in NORM.items():
        apart = {"post_attention_layernorm": "pre_mlp_layernorm"}.get(name, name) + "."
        with_matrix = fused_norms and not (mixture and fused.startswith("mlp."))
        found[(fused if with_matrix else apart) + "weight"] = state[f"{name}.weight"]
    for name in "qk":
        if f"self_attn.{name}_norm.weight" in state:
            found[f"self_attention.{name}_layernorm.weight"] = state[f"self_attn.{name}_norm.weight"]
    return found


def experts_and_halves_apart(layer: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same layer as in newer versions: a tensor for each expert, and for gate and up."""
    apart: dict[str, torch.Tensor] = {}
    for name, tensor in layer.items():
        if name.startswith("mlp.experts.experts."):
            stem = name.removeprefix("mlp.experts.experts.")
            apart |= {f"mlp.experts.experts.{index}.{stem}": one for index, one in enumerate(tensor)}
        else:
            apart[name] = tensor
    for name in [name for name in apart if name.endswith("linear_fc1.weight")]:
        apart[f"{name}_w"], apart[f"{name}_v"] = (half.contiguous() for half in apart.pop(name).chunk(2))
    return apart


def megatron_state(model: Any, layout: str = "stacked", *, padded_vocab: int = 64) -> dict[str, torch.Tensor]:
    """The whole model; all layers in one tensor of each kind, separate layers, or everything separate."""
    stacked = layout == "stacked"
    layers = [megatron_layer(model, layer, fused_norms=stacked) for layer in range(model.config.num_hidden_layers)]
    if layout == "all apart":
        layers = [experts_and_halves_apart(layer) for layer in layers]
    pad = torch.zeros(padded_vocab - model.config.vocab_size, model.config.hidden_size)
    state = {
        "embedding.word_embeddings.weight": torch.cat((model.model.embed_tokens.weight.detach(), pad)),
        "decoder.final_layernorm.weight": model.model.norm.weight.detach(),
    }
    if not model.config.tie_word_embeddings:
        state["output_layer.weight"] = torch.cat((model.lm_head.weight.detach(), pad))
    if stacked:
        return state | {f"decoder.layers.{name}": torch.stack([one[name] for one in layers]) for name in layers[0]}
    return state | {f"decoder.layers.{i}.{name}": one[name] for i, one in enumerate(layers) for name in one}


def save(folder: Path, model: Any, state: dict[str, Any]) -> None:
    with warnings.catch_warnings():  # it warns about a single process in any case
        warnings.simplefilter("ignore", UserWarning)
        distributed_checkpoint.save(state, checkpoint_id=folder, no_dist=True)
    model.config.save_pretrained(folder)
