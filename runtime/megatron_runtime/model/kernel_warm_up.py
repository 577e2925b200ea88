"""Uses each kernel for GPUs that a model needs once, so that it is compiled before the first request.

Triton compiles a kernel for each combination of its constants. Those of these kernels depend on the model, on the block
size of the KV cache, and on four kinds of batches: single tokens and prompts, each with short or long contexts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from megatron_runtime.model.attention import AttentionPlan, plan_attention
from megatron_runtime.model.decoder_layer import DecoderLayer, NumberedLayer
from megatron_runtime.model.embedding import Embedding
from megatron_runtime.model.experts import Experts
from megatron_runtime.model.forward_batch import ForwardBatch
from megatron_runtime.model.kernels.row_kernels import has_row_kernels
from megatron_runtime.model.kv_cache import KVCache
from megatron_runtime.model.latent_attention import MLASelfAttention
from megatron_runtime.model.layers import FeedForward
from megatron_runtime.model.norms import LayerNorm, RMSNorm, SharedRMSNorm
from megatron_runtime.model.positions import LayerPositions, Positions
from megatron_runtime.model.quantized.float8_linear import Float8Linear
from megatron_runtime.model.self_attention import SelfAttention

if TYPE_CHECKING:
    from megatron_runtime.gpu.flashinfer_attention import FlashInfer

NOT_STORED = -1
"""The slot of a token whose key and value are not written."""


@torch.inference_mode()
def use_kernels(
    model: nn.Module,
    dtype: torch.dtype,
    layers: Iterable[NumberedLayer],
    positions: Positions,
    cache: KVCache,
    sampled_vocabulary: int | None,
    flashinfer: FlashInfer | None = None,
) -> None:
    """Launch them on a few zeros. The weights may be of any values, and change meanwhile; no rank waits for another.

    Args:
        model: All modules of this rank.
        dtype: Of the weights.
        layers: The layers of this rank.
        positions: Their rotations.
        cache: On the same device, of at least one block; it is not written to.
        sampled_vocabulary: The number of logits of a row, if this rank samples.
        flashinfer: Attends, if it is chosen; its kernels are compiled too.
    """
    device = cache.device
    if device.type == "cuda":
        torch.cuda.set_device(device)  # of this thread
    if not has_row_kernels(torch.empty(0, dtype=dtype, device=device)):
        return
    _use_row_kernels(model.modules(), layers, dtype, device)
    linears = {module.kernel_key: module for module in model.modules() if isinstance(module, Float8Linear)}
    for linear in linears.values():
        linear.use_kernels()
    for batch in _batches(cache.block_size_tokens, device):
        for module in model.modules():
            if isinstance(module, Embedding):
                module.look_up_on_gpu(batch)
        _attend(plan_attention(batch, cache, flashinfer), batch, dtype, layers, positions, cache)
    if sampled_vocabulary is not None:
        from megatron_runtime.gpu import penalties, sampling

        sampling.use_kernels(sampled_vocabulary, device)
        penalties.use_kernels(sampled_vocabulary, device)


def _use_row_kernels(
    modules: Iterable[nn.Module], layers: Iterable[NumberedLayer], dtype: torch.dtype, device: torch.device
) -> None:
    done: set[tuple[object, int]] = set()

    def use(kind: object, size: int, kernel: Callable[[Tensor], object]) -> None:
        if (kind, size) not in done:
            done.add((kind, size))
            kernel(torch.zeros(1, size, dtype=dtype, device=device))

    for _, layer, next_norm in layers:
        if isinstance(layer, DecoderLayer):
            use((DecoderLayer, type(next_norm)), layer.hidden_size, partial(layer.use_norms, next_norm=next_norm))
    for module in modules:
        if isinstance(module, RMSNorm | LayerNorm) and not isinstance(module, SharedRMSNorm):
            use(type(module), len(module.weight), module)
        elif isinstance(module, FeedForward):
            use(FeedForward, len(module.gate_up.weight), module.combine)
        elif isinstance(module, SelfAttention) and not isinstance(module.query_norm, SharedRMSNorm):
            use(SelfAttention, sum(module.heads) * module.head_dim, partial(_normalize_heads, module))
        elif isinstance(module, Experts):
            use(Experts, module.hidden_size, module.use_kernels)


def _normalize_heads(attention: SelfAttention, rows: Tensor) -> None:
    attention.normalized(rows.view(1, -1, attention.head_dim))


def _attend(
    plan: AttentionPlan,
    batch: ForwardBatch,
    dtype: torch.dtype,
    layers: Iterable[NumberedLayer],
    positions: Positions,
    cache: KVCache,
) -> None:
    prepared = positions(batch.positions)
    done: set[tuple[int, bool]] = set()
    for index, (number, layer, _) in enumerate(layers):
        attention = layer.attention if isinstance(layer, DecoderLayer) else layer.mixer
        rotation = prepared[number].rotation
        if not isinstance(attention, SelfAttention | MLASelfAttention):
            continue
        kind = 0 if rotation is None else rotation[0].shape[-1], attention.window is None
        if kind in done:
            continue
        done.add(kind)
        if isinstance(attention, MLASelfAttention):
            _attend_to_latents(len(batch.tokens), attention, prepared[number], plan, cache, index)
        else:
            heads = torch.zeros(
                *(len(batch.tokens), sum(attention.heads), attention.head_dim), dtype=dtype, device=cache.device
            )
            layer_cache, scoring = cache.layer(index), (attention.window, attention.soft_cap)
            plan.attend(heads, rotation, layer_cache, *scoring, sinks=attention.sinks, is_chunked=attention.is_chunked)


def _attend_to_latents(
    tokens: int,
    attention: MLASelfAttention,
    positions: LayerPositions,
    plan: AttentionPlan,
    cache: KVCache,
    index: int,
) -> None:
    def zeros(*sizes: int) -> Tensor:
        return torch.zeros(tokens, *sizes, dtype=cache.dtype, device=cache.device)

    _, compressed = attention.split(zeros(attention.down_width))
    attention.attend(zeros(attention.heads, attention.head_dim), compressed, positions, plan, cache.layer(index))


def _batches(block_size_tokens: int, device: torch.device) -> Iterator[ForwardBatch]:
    """One request in each, whose blocks are all the first one."""
    from megatron_runtime.gpu.attention import SPLIT

    for tokens, context in ((1, 1), (1, SPLIT + 1), (2, 2), (2, SPLIT + 2)):
        yield ForwardBatch(
            tokens=_filled(0, tokens, torch.int64, device),
            positions=_filled(0, tokens, torch.int64, device),
            slots=_filled(NOT_STORED, tokens, torch.int64, device),
            query_starts=torch.arange(0, tokens + 1, tokens, dtype=torch.int32, device=device),
            context_lengths=_filled(context, 1, torch.int32, device),
            block_tables=_filled(0, -(-context // block_size_tokens), torch.int32, device)[None],
            logit_rows=_filled(0, 1, torch.int64, device),
        )


def _filled(value: int, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((count,), value, dtype=dtype, device=device)
