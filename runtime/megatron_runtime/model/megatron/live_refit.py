"""The weights of a live GPTModel for a decoder that is in use."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from megatron_runtime.errors import CheckpointError
from megatron_runtime.model.config import ModelConfig
from megatron_runtime.model.decoder import Decoder
from megatron_runtime.model.megatron.sharing import is_megatron_model, share_model, share_tensors
from megatron_runtime.model.self_attention import SelfAttention

_SIZES = ("vocab_size", "hidden_size", "num_layers", "num_attention_heads", "num_kv_heads", "head_dim", "norm")


def from_live_model(model: Decoder, weights: Mapping[str, Tensor] | nn.Module) -> Decoder:
    """A decoder like ``model`` with the weights of a live GPTModel, or with its named tensors.

    It shares their memory if they have the data type and the device of the model; otherwise they are copied.

    Raises:
        CheckpointError: The sizes differ, a tensor is missing or not finite, or the model has several ranks.
    """
    if model.ranks.position.sizes.ranks_per_replica_group > 1:
        raise CheckpointError("only one rank can share a live model; write its weights to files and give their path")
    if not isinstance(weights, nn.Module):
        fresh = share_tensors(model.config, weights)
        fresh.positions = model.positions
    elif is_megatron_model(weights):
        fresh = share_model(weights, model.config.vocab_size)
        _require_same_sizes(model.config, fresh.config)
    else:
        raise CheckpointError(f"{type(weights).__name__} is not a GPTModel of Megatron Core; give its named tensors")
    for name, parameter in fresh.named_parameters():
        if not bool(parameter.isfinite().all()):
            raise CheckpointError(f"the Megatron model: {name} has values that are NaN or infinite")
    return fresh if (fresh.dtype, fresh.device) == (model.dtype, model.device) else _copy_of(fresh, model)


def _copy_of(shared: Decoder, like: Decoder) -> Decoder:
    """A copy of the weights with the data type and the device of another decoder."""
    device = "cpu" if like.device.type == "meta" else like.device
    copy = Decoder(shared.config, dtype=like.dtype, device=device)
    for name, parameter in copy.named_parameters():
        parameter.copy_(shared.get_parameter(name))
    for ours, theirs in zip(copy.modules(), shared.modules(), strict=True):
        if isinstance(ours, SelfAttention) and isinstance(theirs, SelfAttention):
            order = theirs.head_order
            ours.head_order = None if order is None else order.to(device)
    copy.positions.frequencies = shared.positions.frequencies.to(device)
    if like.is_packed:
        copy.prepare()
    return copy.eval()


def _require_same_sizes(ours: ModelConfig, theirs: ModelConfig) -> None:
    for field in _SIZES:
        if getattr(ours, field) != getattr(theirs, field):
            raise CheckpointError(
                f"the Megatron model: {field} is {getattr(theirs, field)!r}, but {getattr(ours, field)!r} in the "
                "served model; give a model of the same sizes"
            )
