"""The tensors of a checkpoint that stay quantized on a rank, without torch, for the plan of its memory."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron_runtime.model.formats.coded_rows import BLOCK
from megatron_runtime.model.formats.quantized_weights import KeptKind, KeptWeights
from megatron_runtime.model.formats.tensor_names import TensorNames, tensor_names
from megatron_runtime.model.formats.weight_source import WeightSource, float8_group
from megatron_runtime.model.shard import Shard


def kept_weights(shard: Shard, source: WeightSource, kind: KeptKind) -> KeptWeights:
    """The sums for a model in which all ranks divide matrices like ``shard``."""
    names = tensor_names(shard.config.architecture)
    count = {KeptKind.INTEGERS: _coded_bytes, KeptKind.FLOAT8: _float8_bytes}.get(kind)
    if count is None or names.transposed:
        return KeptWeights()
    sizes = {name: count(name, shard, source, names) for name in _matrices(source, names)}
    kept = {name: size for name, size in sizes.items() if size is not None}
    experts = {name: size for name, size in kept.items() if _is_expert(name, names)}
    return KeptWeights(
        sum(math.prod(source.tensors[name].shape) for name in kept),
        sum(kept.values()),
        sum(math.prod(source.tensors[name].shape) for name in experts),
        sum(experts.values()),
        f"{names.embedding}.weight" in kept,
    )


def _matrices(source: WeightSource, names: TensorNames) -> Iterator[str]:
    """The names of the tensors that may stay quantized, as their placements say."""
    for name, tensor in source.tensors.items():
        stem = name.removesuffix(".weight")
        if len(tensor.shape) == 2 and not stem.endswith((f".{names.kv_up}", f".{names.router}")):
            yield name


def _coded_bytes(name: str, shard: Shard, source: WeightSource, names: TensorNames) -> int | None:
    """Bytes of a tensor; None unless all rows of its matrix are quantized, and ranks divide its columns between
    blocks."""
    stem, tensor = name.removesuffix(".weight"), source.tensors[name]
    part = _columns(stem, shard, names)
    is_whole = part is None or (part.start % BLOCK == 0 and len(part) % BLOCK == 0)
    if not is_whole or any(source.tensors[f"{each}.weight"].coding is None for each in _fused(stem, shard, names)):
        return None
    assert tensor.coding is not None
    return tensor.coding.num_bytes(math.prod(tensor.shape))


def _float8_bytes(name: str, shard: Shard, source: WeightSource, names: TensorNames) -> int | None:
    """The same for fp8, with a scale in float32 for each group of columns of a row; None for tables."""
    stem, (rows, width) = name.removesuffix(".weight"), source.tensors[name].shape
    if stem in (names.embedding, names.head):
        return None
    part = _columns(stem, shard, names) or range(width)
    group = float8_group([source.tensors[f"{each}.weight"].float8 for each in _fused(stem, shard, names)], part, width)
    if group is None:
        return None
    groups = -(-len(part) // group) * (width // len(part))
    return rows * (width + 4 * groups)


def _fused(stem: str, shard: Shard, names: TensorNames) -> Iterator[str]:
    """The tensors that are rows of the same matrix, or ``stem`` alone."""
    latent, networks = shard.config.latent_attention, (names.gate_up, names.expert_gate_up, names.shared_gate_up)
    has_query_latent = latent is not None and latent.q_lora_rank is not None
    attention = (names.query_down, names.kv_down) if has_query_latent else names.qkv
    for fused in (attention, names.recurrent_inputs, names.recurrent_gates, *networks):
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
