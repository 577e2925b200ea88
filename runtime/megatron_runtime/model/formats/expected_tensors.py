"""The tensors of a model's checkpoint, computed without torch for the preflight."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from megatron_runtime.model.config import ExpertsConfig, LatentAttentionConfig, ModelConfig
from megatron_runtime.model.formats.tensor_names import TensorNames, tensor_names
from megatron_runtime.model.recurrent_config import Mamba2Config, RecurrentConfig

Shape = tuple[int, ...]
Shapes = Iterator[tuple[str, Shape]]


def expected_tensors(config: ModelConfig) -> dict[str, Shape]:
    """The shape of each tensor by Hugging Face's name, in the order of `Decoder.placements` of a whole decoder."""
    names = tensor_names(config.architecture)
    vocabulary = (config.vocab_size, config.hidden_size)
    shapes: dict[str, Shape] = {f"{names.embedding}.weight": vocabulary}
    if config.learned_positions:
        shapes[f"{names.learned_positions}.weight"] = (config.learned_positions, config.hidden_size)
    shapes |= _norm(config, names.final_norm, config.hidden_size)
    table = names.embedding if config.tie_word_embeddings else names.head
    shapes.setdefault(f"{table}.weight", vocabulary)
    for layer in range(config.num_layers):
        prefix = names.layer.format(layer)
        shapes |= {prefix + name: shape for name, shape in _layer(config, layer, names)}
    return shapes


def expert_parameters(config: ModelConfig) -> int:
    """Elements of all experts, including shared ones, without routers: the part that the ranks of a stage divide."""
    names = tensor_names(config.architecture)
    layers = (config.experts_of(layer) for layer in range(config.num_layers))
    networks = (_expert_networks(config, experts, names) for experts in layers if experts is not None)
    return sum(math.prod(shape) for tensors in networks for _, shape in tensors)


def _layer(config: ModelConfig, layer: int, names: TensorNames) -> Shapes:
    if config.feed_forward_layers is not None:
        yield from _norm(config, names.mixer_norm, config.hidden_size).items()
        is_fed = config.kind(layer) == "feed_forward"
        yield from (_network if is_fed else _attention)(config, layer, names)
        return
    goes_in, comes_out = (config.norm_placement in (place, "around") for place in ("before", "after"))
    for name, is_there in (
        (names.attention_norm, goes_in),
        (names.attention_output_norm, comes_out),
        (names.feed_forward_norm, goes_in and not config.parallel_feed_forward),
        (names.feed_forward_output_norm, comes_out),
    ):
        if is_there:
            yield from _norm(config, name, config.hidden_size).items()
    yield from _attention(config, layer, names)
    yield from _network(config, layer, names)


def _network(config: ModelConfig, layer: int, names: TensorNames) -> Shapes:
    if (experts := config.experts_of(layer)) is None:
        yield from _feed_forward(config, names, names.gate_up, names.down, config.intermediate_size)
    else:
        yield from _experts(config, experts, names)


def _experts(config: ModelConfig, experts: ExpertsConfig, names: TensorNames) -> Shapes:
    yield from _matrix(names, names.router, experts.count, config.hidden_size, bias=experts.routing.has_bias)
    if experts.routing.has_selection_bias:
        yield names.selection_bias, (experts.count,)
    yield from _expert_networks(config, experts, names)
    if experts.has_shared_expert_gate:
        yield from _matrix(names, names.shared_expert_gate, 1, config.hidden_size, bias=False)


def _expert_networks(config: ModelConfig, experts: ExpertsConfig, names: TensorNames) -> Shapes:
    for index in range(experts.count):
        prefix = names.expert.format(index)
        gate_up = [prefix + name for name in names.expert_gate_up]
        yield from _feed_forward(config, names, gate_up, prefix + names.expert_down, experts.intermediate_size)
    if experts.shared_intermediate_size:
        size = experts.shared_intermediate_size
        yield from _feed_forward(config, names, names.shared_gate_up, names.shared_down, size)


def _attention(config: ModelConfig, layer: int, names: TensorNames) -> Shapes:
    if (sizes := config.recurrence_of(layer)) is not None:
        yield from _recurrence(config, sizes, names)
    elif config.latent_attention is None:
        yield from _grouped_query_attention(config, names)
    else:
        yield from _latent_attention(config, config.latent_attention, names)


def _grouped_query_attention(config: ModelConfig, names: TensorNames) -> Shapes:
    heads = (config.num_attention_heads, config.num_kv_heads, config.num_kv_heads)
    queries, keys, values = (count * config.head_dim for count in heads)
    if config.query_key_norm == "each_head":
        yield f"{names.query_norm}.weight", (config.num_attention_heads, config.head_dim)
        yield f"{names.key_norm}.weight", (config.num_kv_heads, config.head_dim)
    elif config.query_key_norm not in ("none", "unweighted"):
        is_whole = config.query_key_norm == "projection"
        yield from _norm(config, names.query_norm, queries if is_whole else config.head_dim).items()
        yield from _norm(config, names.key_norm, keys if is_whole else config.head_dim).items()
    if config.attention_sinks:
        yield names.attention_sinks, (config.num_attention_heads,)
    projected = 2 * queries if config.attention_output_gate else queries
    yield from _fused(names, names.qkv, (projected, keys, values), config.hidden_size, bias=config.qkv_bias)
    bias = config.attention_output_bias
    yield from _matrix(names, names.attention_output, config.hidden_size, queries, bias=bias)


def _recurrence(config: ModelConfig, sizes: RecurrentConfig, names: TensorNames) -> Shapes:
    hidden = config.hidden_size
    yield names.log_rates, (sizes.value_heads,)
    yield names.step_biases, (sizes.value_heads,)
    yield f"{names.convolution}.weight", (sizes.channels, 1, sizes.taps)
    bias = False
    if isinstance(sizes, Mamba2Config):
        bias = sizes.has_bias
        if sizes.has_convolution_bias:
            yield f"{names.convolution}.bias", (sizes.channels,)
        yield names.skips, (sizes.value_heads,)
        yield f"{names.recurrent_norm}.weight", (sizes.values,)
        rows = sizes.values + sizes.channels + sizes.value_heads
        yield from _fused(names, names.recurrent_inputs, (rows,), hidden, bias=bias)
    else:
        yield f"{names.recurrent_norm}.weight", (sizes.value_dim,)
        yield from _fused(names, names.recurrent_inputs, (sizes.channels, sizes.values), hidden, bias=False)
        yield from _fused(names, names.recurrent_gates, (sizes.value_heads,) * 2, hidden, bias=False)
    yield from _matrix(names, names.recurrent_output, hidden, sizes.values, bias=bias)


def _latent_attention(config: ModelConfig, latent: LatentAttentionConfig, names: TensorNames) -> Shapes:
    hidden, heads, rank = config.hidden_size, config.num_attention_heads, latent.kv_lora_rank
    queries, columns = names.qkv[0], hidden
    stored, sizes = [names.kv_down], [rank + latent.qk_rope_head_dim]
    if latent.q_lora_rank is not None:
        queries, columns = names.query_up, latent.q_lora_rank
        stored, sizes = [names.query_down, *stored], [columns, *sizes]
        yield f"{names.query_down_norm}.weight", (columns,)
    yield from _fused(names, stored, sizes, hidden, bias=config.qkv_bias)
    yield from _matrix(names, queries, heads * config.head_dim, columns, bias=False)
    yield f"{names.kv_down_norm}.weight", (rank,)
    yield from _matrix(names, names.kv_up, heads * (latent.qk_nope_head_dim + latent.v_head_dim), rank, bias=False)
    bias = config.attention_output_bias
    yield from _matrix(names, names.attention_output, hidden, heads * latent.v_head_dim, bias=bias)


def _feed_forward(
    config: ModelConfig, names: TensorNames, gate_up: Sequence[str], down: str, intermediate_size: int
) -> Shapes:
    widened = (intermediate_size,) * (2 if config.gated_feed_forward else 1)
    yield from _fused(names, gate_up, widened, config.hidden_size, bias=config.mlp_bias)
    yield from _matrix(names, down, config.hidden_size, intermediate_size, bias=config.mlp_bias)


def _norm(config: ModelConfig, name: str, size: int) -> dict[str, Shape]:
    kinds = ("weight", "bias") if config.norm == "layer" else ("weight",)
    return {f"{name}.{kind}": (size,) for kind in kinds}


def _fused(names: TensorNames, stored: Sequence[str], rows: Sequence[int], columns: int, *, bias: bool) -> Shapes:
    """Matrices that the decoder fuses: stored as one each, or as one with the rows of all."""
    counts = rows if len(stored) == len(rows) else (sum(rows),)
    for name, count in zip(stored, counts, strict=True):
        yield from _matrix(names, name, count, columns, bias=False)
    if bias:
        yield from ((f"{name}.bias", (count,)) for name, count in zip(stored, counts, strict=True))


def _matrix(names: TensorNames, name: str, rows: int, columns: int, *, bias: bool) -> Shapes:
    yield f"{name}.weight", (columns, rows) if names.transposed else (rows, columns)
    if bias:
        yield f"{name}.bias", (rows,)
