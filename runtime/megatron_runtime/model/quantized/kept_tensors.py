"""The tensors of a checkpoint that stay quantized on a rank, without torch, for the plan of its memory."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron_runtime.model.formats.coded_rows import BLOCK
from megatron_runtime.model.formats.quantized_weights import KeptWeights
from megatron_runtime.model.formats.tensor_names import TensorNames, tensor_names
from megatron_runtime.model.formats.weight_source import StoredTensor, WeightSource
from megatron_runtime.model.shard import Shard


def kept_weights(shard: Shard, source: WeightSource) -> KeptWeights:
    """The sums for a model in which all ranks divide matrices like ``shard``."""
    names = tensor_names(shard.config.architecture)
    kept = {name: tensor for name, tensor in source.tensors.items() if _is_kept(name, shard, source, names)}
    experts = {name: tensor for name, tensor in kept.items() if _is_expert(name, names)}
    return KeptWeights(
        sum(math.prod(tensor.shape) for tensor in kept.values()),
        sum(map(_num_bytes, kept.values())),
        sum(math.prod(tensor.shape) for tensor in experts.values()),
        sum(map(_num_bytes, experts.values())),
        f"{names.embedding}.weight" in kept,
    )


def _is_kept(name: str, shard: Shard, source: WeightSource, names: TensorNames) -> bool:
    """Whether all rows of the tensor's matrix are quantized, and ranks divide its columns between blocks."""
    if names.transposed or len(source.tensors[name].shape) != 2:
        return False
    stem = name.removesuffix(".weight")
    if stem.endswith((f".{names.kv_up}", f".{names.router}")):  # as their placements say
        return False
    part = _columns(stem, shard, names)
    is_whole = part is None or (part.start % BLOCK == 0 and len(part) % BLOCK == 0)
    return is_whole and all(source.tensors[f"{each}.weight"].coding is not None for each in _fused(stem, names))


def _fused(stem: str, names: TensorNames) -> Iterator[str]:
    """The tensors that are rows of the same matrix, or ``stem`` alone."""
    networks = (names.gate_up, names.expert_gate_up, names.shared_gate_up)
    together = (names.qkv, names.recurrent_inputs, names.recurrent_gates, *networks)
    for fused in together:
        for own in fused:
            if stem.endswith(f".{own}"):
                yield from (stem.removesuffix(own) + other for other in fused)
                return
    yield stem


def _columns(stem: str, shard: Shard, names: TensorNames) -> range | None:
    """The columns on the rank of a matrix whose columns ranks divide."""
    experts, recurrent = shard.config.experts, shard.config.recurrent
    if recurrent is not None and stem.endswith(names.recurrent_output):
        heads = shard.recurrent_value_heads(recurrent)
        return range(heads.start * recurrent.value_dim, heads.stop * recurrent.value_dim)
    if stem.endswith(names.attention_output):
        latent, heads = shard.config.latent_attention, shard.query_heads
        size = shard.config.head_dim if latent is None else latent.v_head_dim
        return range(heads.start * size, heads.stop * size)
    if experts is not None and stem.endswith(names.shared_down):
        return shard.shared_expert_channels(experts)
    if experts is not None and _is_expert(stem, names) and stem.endswith(names.expert_down):
        return shard.expert_channels(experts)
    return shard.channels if stem.endswith(names.down) else None


def _is_expert(name: str, names: TensorNames) -> bool:
    shared = (*names.shared_gate_up, names.shared_down)
    return names.expert.partition("{}")[0] in name or any(each in name for each in shared)


def _num_bytes(tensor: StoredTensor) -> int:
    assert tensor.coding is not None
    return tensor.coding.num_bytes(math.prod(tensor.shape))
